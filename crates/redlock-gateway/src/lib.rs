//! redlock-gateway: distributed locks over plain HTTP.
//!
//! Data flows one way: HTTP → gateway → core → node → Redis. `ARCHITECTURE.md` of the core follows
//! a request through all of them.
//!
//! | room | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`cli`] | commands and flags of the program | how commands are carried out |
//! | [`config`] | flags, environment and file to plain values | everything else |
//! | `serve` | starts and stops nodes, core, gateway and server from a configuration | what requests mean |
//! | [`http`] | routes, bodies, statuses, the OpenAPI document | node count, quorum, Redis, clocks, retries |
//! | `transport` | from a socket to requests with a known client | routes, nodes |
//! | [`overload`] | limits what each client takes of shared resources | routes, statuses, the rules of locks |
//! | [`auth`] | keys, and their permissions on lock names | HTTP, locks but for their names |
//! | [`audit`] | the record of who did what | how requests are served |
//! | [`info`] | the text stored beside a lock for people | HTTP, nodes |
//! | [`gateway`] | limits, release of undeliverable grants, draining | axum, status codes, Redis keys |
//! | `reload` | notices that files have to be read again | contents of the files |
//! | [`output`] | writes to standard output and error with a time limit | contents of the output |
//! | [`pattern`] | sets of lock names | uses of the sets |
//! | [`proxies`] | trusted proxies, and the client addresses that they name | connections, limits |
//! | `remedy` | advice about a node, in flags and commands | nodes |
//! | [`telemetry`] | names of metrics, buckets, logging, traces | what the numbers mean |
//! | [`commands`] | `check`, `reconfigure`, `key new` | HTTP |
//! | `redlock_api` | bodies, error codes and headers on the wire | what a value may be |
//! | `redlock_core` | the algorithm | HTTP, serde, environment |

pub mod audit;
pub mod auth;
pub mod cli;
pub mod commands;
pub mod config;
pub mod gateway;
pub mod http;
pub mod info;
pub mod output;
pub mod overload;
pub mod pattern;
pub mod proxies;
mod reload;
mod remedy;
mod serve;
pub mod telemetry;
mod transport;

pub use reload::Reload;
pub use serve::{Running, ServeError, check_files, run, within_descriptors};

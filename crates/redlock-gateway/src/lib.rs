//! redlock-gateway: distributed locks over plain HTTP.
//!
//! Data flows one way: HTTP → gateway → core → node → Redis; `ARCHITECTURE.md` of the core follows a request.
//!
//! | room | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`cli`] | what the program can be told to do | how it is done |
//! | [`config`] | flags, environment and file to plain values | everything else |
//! | `serve` | wiring: nodes, core, gateway and server from a configuration, and down again | what requests mean |
//! | [`http`] | routes, bodies, statuses, the OpenAPI document | node count, quorum, Redis, clocks, retries |
//! | `transport` | from a socket to requests that know their client | routes, nodes |
//! | [`overload`] | what each client may take of what all share | routes, statuses, the rules of locks |
//! | [`auth`] | keys, and who may do what to which names | HTTP, locks but for their names |
//! | [`audit`] | the record of who did what | how requests are served |
//! | [`info`] | what is stored beside a lock for people | HTTP, nodes |
//! | [`gateway`] | limits, undoing what cannot be delivered, draining | axum, status codes, Redis keys |
//! | `reload` | when files have to be read again | what is in them |
//! | [`output`] | standard output and error that nobody may read | what is written |
//! | [`pattern`] | sets of lock names | what they are for |
//! | [`proxies`] | which proxies are trusted, and which client address they name | connections, limits |
//! | `remedy` | what can be done about a node, in flags | nodes |
//! | [`telemetry`] | names of metrics, buckets, logging, traces | what the numbers mean |
//! | [`commands`] | `check`, `reconfigure` | HTTP |
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
pub use serve::{Running, check_files, run, within_descriptors};

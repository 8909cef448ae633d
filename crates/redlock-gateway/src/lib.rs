//! redlock-gateway: distributed locks over plain HTTP.
//!
//! Data flows one way: HTTP → gateway → core → node → Redis. `ARCHITECTURE.md` of the core follows
//! a request through all of them.
//!
//! | room | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`cli`] | commands and flags of the program | how commands are carried out |
//! | [`config`] | turns flags, environment and file into validated plain values | what the values are used for |
//! | `serve` | starts and stops nodes, core, gateway and server from a configuration | what requests mean |
//! | [`http`] | routes, bodies, statuses, the OpenAPI document | Redis, clocks, retries; it shows node counts, but does not decide by them |
//! | `transport` | accepts connections, and attaches the client to each request | routes, nodes |
//! | [`overload`] | limits what each client takes of shared resources | routes, statuses, the rules of locks |
//! | [`auth`] | keys, and their permissions on lock names | HTTP; locks, except for their names |
//! | [`audit`] | the record of who did what | how requests are served |
//! | [`callbacks`] | signed POSTs to URLs that clients give, and the check of these URLs | locks, who may ask for what |
//! | [`info`] | the text stored beside a lock for people | HTTP, nodes |
//! | [`gateway`] | limits requests, releases grants that cannot be delivered, drains at shutdown | axum, status codes, Redis keys |
//! | `reload` | notices when files must be read again | contents of the files |
//! | [`origin`] | origins in the form that browsers send | who may call, where callbacks go |
//! | [`output`] | writes to standard output and error with a time limit | contents of the output |
//! | [`pattern`] | sets of lock names | uses of the sets |
//! | [`proxies`] | which proxies are trusted, and the client addresses that these proxies report | connections, limits |
//! | `remedy` | translates the core's advice about a node into flags and commands | how nodes are probed |
//! | [`telemetry`] | metrics with their names and buckets, the log, traces | what the numbers mean |
//! | [`commands`] | `check`, `reconfigure`, `key new` | HTTP |
//! | `redlock_api` | bodies, error codes and headers on the wire | what a value may be |
//! | `redlock_core` | the algorithm | HTTP, serde, environment |

pub mod audit;
pub mod auth;
pub mod callbacks;
pub mod cli;
pub mod commands;
pub mod config;
pub mod gateway;
pub mod http;
pub mod info;
pub mod origin;
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
pub use serve::{Running, ServeError, check_files, listeners, run, within_descriptors};

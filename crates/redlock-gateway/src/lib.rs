//! redlock-gateway: distributed locks over plain HTTP.
//!
//! Data flows one way: HTTP → gateway → core → node → Redis; `ARCHITECTURE.md` of the core follows a request.
//!
//! | room | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`cli`] | what the program can be told to do | how it is done |
//! | [`config`] | flags, environment and file to plain values | everything else |
//! | `serve` | wiring: nodes, core, gateway and server from a configuration, and down again | what requests mean |
//! | [`capacity`] | how much of everything there may be, by memory and file descriptors | what it is used for |
//! | [`clients`] | what each client has taken of what all share | what it is taken for |
//! | `connections` | which connections are open, and which one goes when another needs its place | HTTP |
//! | `connection` | from an accepted connection to requests that know their client | configuration, nodes |
//! | [`http`] | routes, bodies, statuses, the OpenAPI document | node count, quorum, Redis, clocks, retries |
//! | [`auth`] | keys, and who may do what to which names | HTTP, locks but for their names |
//! | [`audit`] | the record of who did what | how requests are served |
//! | [`info`] | what is stored beside a lock for people | HTTP, nodes |
//! | [`gateway`] | limits, undoing what cannot be delivered, draining | axum, status codes, Redis keys |
//! | `tls` | what HTTPS is served with, also when it is replaced | connections |
//! | `reload` | when files have to be read again | what is in them |
//! | [`output`] | standard output and error that nobody may read | what is written |
//! | [`pattern`] | sets of lock names | what they are for |
//! | `peer` | who is at the other end, and whether still | HTTP, locks |
//! | [`proxies`] | which proxies are trusted, and which client address they name | connections, limits |
//! | [`refusals`] | what was refused, in few lines | why |
//! | `remedy` | what can be done about a node, in flags | nodes |
//! | [`telemetry`] | names of metrics, buckets, logging, traces | what the numbers mean |
//! | [`commands`] | `check`, `reconfigure` | HTTP |
//! | `redlock_core` | the algorithm | HTTP, serde, environment |

pub mod audit;
pub mod auth;
pub mod capacity;
pub mod cli;
pub mod clients;
pub mod commands;
pub mod config;
mod connection;
mod connections;
pub mod gateway;
pub mod http;
pub mod info;
pub mod output;
pub mod pattern;
mod peer;
pub mod proxies;
pub mod refusals;
mod reload;
mod remedy;
mod serve;
pub mod telemetry;
mod tls;

pub use reload::Reload;
pub use serve::{Running, check_files, run, within_descriptors};

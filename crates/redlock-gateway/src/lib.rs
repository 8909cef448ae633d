//! redlock-gateway: distributed locks over plain HTTP.
//!
//! Data flows one way: HTTP → gateway → core → node client → Redis.
//!
//! | room | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`config`] | flags, environment and file to plain values | everything else |
//! | `serve` | wiring: nodes, core, gateway and server from a configuration, and down again | what requests mean |
//! | [`http`] | routes, bodies, statuses, the OpenAPI document | node count, quorum, Redis, clocks, retries |
//! | [`auth`] | keys, and who may do what to which names | HTTP, locks but for their names |
//! | [`audit`] | the record of who did what | how requests are served |
//! | [`info`] | what is stored beside a lock for people | HTTP, nodes |
//! | [`limits`] | what requests may ask for | who asks |
//! | [`gateway`] | limits, undoing what cannot be delivered, draining | axum, status codes, Redis keys |
//! | `tls` | the handshakes of HTTPS, with certificates that are replaced | what is said on a connection |
//! | `reload` | when files have to be read again | what is in them |
//! | `peer` | who is at the other end, and whether still | HTTP, locks |
//! | [`telemetry`] | names of metrics, buckets, logging | what the numbers mean |
//! | [`commands`] | `check`, `reconfigure` | HTTP |
//! | `redlock_core` | the algorithm | HTTP, serde, environment |

pub mod audit;
pub mod auth;
pub mod commands;
pub mod config;
pub mod gateway;
pub mod http;
pub mod info;
pub mod limits;
mod peer;
mod reload;
mod serve;
pub mod telemetry;
mod tls;

pub use reload::Reload;
pub use serve::{Running, run};

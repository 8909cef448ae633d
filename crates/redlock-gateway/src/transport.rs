//! Turns sockets into requests: open connections, TLS, and clients that hang up.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `connections` | which connections are open, and which one is closed for a newcomer | HTTP |
//! | `server` | the listener, the protocol of each connection, and the shutdown | routes, nodes |
//! | `frames` | how many frames an HTTP/2 client sends | streams |
//! | `streams` | the streams of an HTTP/2 connection, and their limits | requests |
//! | `connection` | one accepted connection, and its requests with their client | routes, nodes |
//! | `tls` | the HTTPS configuration, and its renewal when certificates are replaced | connections |
//! | `disconnect` | the client of a connection, and whether it is still there | HTTP, locks |

pub(crate) mod connection;
pub(crate) mod connections;
pub(crate) mod disconnect;
pub(crate) mod frames;
pub(crate) mod rest;
pub(crate) mod server;
pub(crate) mod streams;
pub(crate) mod tls;

//! From a socket to requests: which connections are open, TLS, and whether a client is still there.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `connections` | which connections are open, and which one ends when another needs its place | HTTP |
//! | `connection` | one accepted connection, and its requests with the client that sent them | routes, nodes |
//! | `tls` | what HTTPS is served with, also when certificates are replaced | connections |
//! | `disconnect` | who is at the other end of a connection, and whether still | HTTP, locks |

pub(crate) mod connection;
pub(crate) mod connections;
pub(crate) mod disconnect;
pub(crate) mod tls;

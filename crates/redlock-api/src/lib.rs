//! The shapes on the wire: JSON bodies, error codes and header names. The gateway, its client and
//! the command line share them, so each is declared once.
//!
//! | module | what it has |
//! | --- | --- |
//! | `headers` | names of headers |
//! | `health` | `GET /livez`, `/readyz`, `/healthz` |
//! | `locks` | `POST`, `PATCH`, `DELETE` and `GET /locks/{name}`, `GET` and `PATCH /locks` |
//! | `problem` | the body of every error, and its codes |
//! | `requests` | `POST /requests`, `GET /requests/{id}`, and the callback of a request |
//! | `watch` | the data of the events in `GET /locks/{name}` and `GET /locks` as event streams |
//!
//! Compatibility: a reader of an answer ignores fields that it does not know. A code that it does
//! not know stays a text. An unknown state of a lock is read as [`LockState::Unknown`]. Requests
//! are stricter: the gateway refuses unknown fields, because a misspelt field must not silently
//! give a default.
//!
//! Optional fields are omitted, never null: several client generators drop or mistype nullable
//! fields.
//!
//! The doc comments of the shapes are the descriptions in the OpenAPI document (feature
//! `openapi`). This crate knows no web framework, no Redis and none of the algorithm. The gateway
//! checks values and converts the core's types.

pub mod headers;
mod health;
mod locks;
mod problem;
mod requests;
mod watch;

pub use self::health::{Health, NodeHealth};
pub use self::locks::{
    AcquireBody, AcquireSetBody, ExtendBody, ExtendManyBody, ExtendManyResults, ExtendResult,
    Granted, HeldLock, Lease, LeaseRef, LockList, LockState, LockStatus, NodeAnswer, ReleaseResult,
    ReleaseSetResults, SetLease, SlotHolder, Waiter,
};
pub use self::problem::{PROBLEM_MEDIA_TYPE, Problem, ProblemCode};
pub use self::requests::{
    CallbackState, DeferBody, LockReady, LockReadyData, RequestState, RequestStatus,
};
pub use self::watch::{Lagged, LockSnapshot, StreamEnd, StreamEndReason, WaitingStatus};

#[cfg(test)]
mod tests;

//! The synchronization of the queues. `interleavings.rs` puts shuttle's in its place.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Mutex, MutexGuard};

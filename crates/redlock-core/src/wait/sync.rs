//! The locks and atomics of the queues. `interleavings.rs` replaces them by those of shuttle.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Mutex, MutexGuard};

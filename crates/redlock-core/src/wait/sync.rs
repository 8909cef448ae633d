//! What the queues are synchronized with. Explorations of their interleavings put something else in its place.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Mutex, MutexGuard};

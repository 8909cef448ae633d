//! What requests may ask for: set by the configuration, lowered for some keys.

use std::time::Duration;

use redlock_core::Ttl;

/// Beyond any of these a request is refused, not clamped.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Of a request that names none.
    pub default_ttl: Ttl,
    pub max_ttl: Ttl,
    /// For a holder to let go.
    pub max_wait: Duration,
    /// From the grant to the end, all extensions included.
    pub max_hold: Duration,
}

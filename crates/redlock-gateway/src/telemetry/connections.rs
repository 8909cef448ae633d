//! Metrics of connections.

use metrics::{Counter, Gauge};

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionRefused {
    /// The limit on connections is reached, and no connection could be closed for the new one.
    Full,
    /// The limit on connections of one address is reached.
    Client,
    /// The TLS handshake failed.
    Handshake,
}

/// In the order of the enum.
const REFUSED: [ConnectionRefused; 3] =
    [ConnectionRefused::Full, ConnectionRefused::Client, ConnectionRefused::Handshake];

impl ConnectionRefused {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "max_connections",
            Self::Client => "max_connections_per_client",
            Self::Handshake => "tls_handshake",
        }
    }
}

/// With what a client floods an HTTP/2 connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flood {
    /// Too many requests ended before their answers.
    Resets,
    /// Too many frames without requests.
    Frames,
    /// A request head that is too long, or that another frame interrupts.
    Head,
}

/// In the order of the enum.
const FLOODS: [Flood; 3] = [Flood::Resets, Flood::Frames, Flood::Head];

impl Flood {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resets => "resets",
            Self::Frames => "frames",
            Self::Head => "head",
        }
    }
}

#[derive(Clone)]
pub struct ConnectionMetrics {
    open: Gauge,
    limit: Gauge,
    refused: [Counter; REFUSED.len()],
    evicted: Counter,
    flooded: [Counter; FLOODS.len()],
}

impl ConnectionMetrics {
    pub(super) fn new() -> Self {
        describe();
        Self {
            open: metrics::gauge!("redlock_connections"),
            limit: metrics::gauge!("redlock_connections_limit"),
            refused: REFUSED
                .map(|why| metrics::counter!("redlock_connections_refused_total", "reason" => why.as_str())),
            evicted: metrics::counter!("redlock_connections_evicted_total"),
            flooded: FLOODS
                .map(|how| metrics::counter!("redlock_http2_floods_total", "reason" => how.as_str())),
        }
    }

    /// Metrics that are not exported.
    pub fn uncounted() -> Self {
        let refused = REFUSED.map(|_| Counter::noop());
        let flooded = FLOODS.map(|_| Counter::noop());
        let evicted = Counter::noop();
        Self { open: Gauge::noop(), limit: Gauge::noop(), refused, evicted, flooded }
    }

    pub fn open(&self, count: usize) {
        self.open.set(count as f64);
    }

    pub fn limit(&self, limit: usize) {
        self.limit.set(limit as f64);
    }

    pub fn refused(&self, why: ConnectionRefused) {
        self.refused[why as usize].increment(1);
    }

    pub fn evicted(&self) {
        self.evicted.increment(1);
    }

    pub fn flooded(&self, how: Flood) {
        self.flooded[how as usize].increment(1);
    }
}

fn describe() {
    use metrics::{describe_counter as counter, describe_gauge as gauge};
    gauge!("redlock_connections", "Open connections.");
    gauge!("redlock_connections_limit", "Maximum number of open connections.");
    counter!(
        "redlock_connections_refused_total",
        "Connections that were closed before their first request, by reason."
    );
    counter!(
        "redlock_connections_evicted_total",
        "Idle connections that were closed to make room for others."
    );
    counter!(
        "redlock_http2_floods_total",
        "HTTP/2 connections that the gateway ended, because the client reset too many requests, \
         sent too many frames, or sent a request head that was too long or interrupted."
    );
}

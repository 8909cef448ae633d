//! The headings of the help. clap prints them in the order in which flags first name them, after the
//! flags without a heading: those that a command has for itself.

pub(super) const ADDRESSES: &str = "Addresses, proxies and TLS";
pub(super) const NODES: &str = "Redis masters";
pub(super) const LOCKS: &str = "Locks and waiting";
pub(super) const LOAD: &str = "Memory and load";
pub(super) const ACCESS: &str = "Access and audit";
pub(super) const CALLBACKS: &str = "Callbacks";
pub(super) const OBSERVABILITY: &str = "Logs, traces and metrics";
pub(super) const PROCESS: &str = "Configuration file and shutdown";

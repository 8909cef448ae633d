//! Black-box tests: the core by its public API, on masters in memory and on real redis-servers, and the gateway as a process.

/// What tests stand on: processes, certificates, clocks, clients.
mod support {
    pub(crate) mod certificates;
    pub(crate) mod cluster;
    pub(crate) mod gateway;
    pub(crate) mod harness;
    pub(crate) mod nodes;
    pub(crate) mod secrets;
}

/// One node by its seam.
mod node {
    mod admission;
    pub(crate) mod contract;
    mod differential;
    mod pipelining;
    mod rules;
}

/// Whole locks by the interface of the core.
mod core {
    mod fencing;
    mod healing;
    mod locks;
    mod same_owner;
    mod waiting;
}

/// The contract of the gateway's API.
mod http {
    mod auth;
    mod browser;
    mod errors;
    mod fencing;
    mod fuzz;
    mod locks;
    pub(crate) mod openapi;
    mod retries;
    mod tls;
    pub(crate) mod waiting;
    mod waiting_gateways;
}

/// What an operator sets and sees.
mod operations {
    mod admission;
    mod config;
    mod growth;
    mod lifecycle;
    mod masters_tls;
    pub(crate) mod metrics;
}

/// The source tree itself.
mod repository {
    mod layout;
    mod readme;
    mod supply_chain;
}

use crate::http::{openapi, waiting as http_waiting};
use crate::node::contract;
use crate::operations::metrics as http_metrics;
use crate::support::{certificates, cluster as terms, gateway, harness, nodes, secrets};

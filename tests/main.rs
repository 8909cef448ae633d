//! Black-box tests. They use the core through its public API, on masters in memory and on real
//! redis-servers. They run the gateway as a process.

/// Support for the tests: processes, certificates, clocks, clients.
mod support {
    pub(crate) mod certificates;
    pub(crate) mod chance;
    pub(crate) mod client;
    pub(crate) mod cluster;
    pub(crate) mod gateway;
    pub(crate) mod harness;
    pub(crate) mod http2;
    pub(crate) mod measure;
    pub(crate) mod metrics;
    pub(crate) mod nodes;
    pub(crate) mod openapi;
    pub(crate) mod proxy;
    pub(crate) mod receiver;
    pub(crate) mod resp;
    pub(crate) mod secrets;
    pub(crate) mod stream;
    pub(crate) mod turncoat;
    pub(crate) mod waiters;
}

/// One node, called through the `Node` trait.
mod node {
    mod agreement;
    mod batches;
    mod callers;
    mod contract;
    mod differential;
    mod eligibility;
    mod lost_writes;
    mod malformed;
    mod module;
    mod moved;
    mod noise;
    mod pipelining;
    mod recovered;
    mod redis;
    mod rules;
    mod subject;
}

/// Whole locks, through the core's public API.
mod core {
    mod catch_up;
    mod examples;
    mod failures;
    mod fencing;
    mod given_up;
    mod hints;
    mod late_repairs;
    mod listing;
    mod locks;
    mod permissions;
    mod recovery;
    mod repair;
    mod same_owner;
    mod slots;
    mod suspended;
    mod waiting;
    mod waiting_polls;
}

/// The contract of the gateway's HTTP API.
mod http {
    mod audit;
    mod auth;
    mod behind_a_proxy;
    mod browser;
    mod deferred;
    mod docs;
    mod errors;
    mod extend_many;
    mod fencing;
    mod front_door;
    mod fuzz;
    mod given_up;
    mod held_streams;
    mod http2;
    mod http2_attacks;
    mod kept_places;
    pub(crate) mod keys;
    mod least_hold;
    mod listing;
    mod locks;
    mod lost_responses;
    mod openapi;
    mod places;
    mod precedence;
    mod proxies;
    mod quotas;
    mod refused;
    mod retries;
    mod rights;
    mod sets;
    mod sites;
    mod slots;
    mod stalls;
    mod tls;
    mod unread;
    mod waiting;
    mod waiting_gateways;
    mod waiting_order;
    mod waiting_places;
    mod watch;
}

/// Clients that hold locks: the Rust client and the command line tool `redlock`.
mod clients {
    mod guard;
    mod recipes;
    mod refusals;
    mod run;
    mod together;
    mod top;
    mod watch;
}

/// What operators set and what they observe.
mod operations {
    mod config;
    mod connections;
    mod eligibility;
    mod first_start;
    mod growth;
    mod lifecycle;
    mod log_lines;
    mod masters_tls;
    mod memory;
    mod metrics;
    mod monitoring;
    mod nonsense;
    mod output;
    mod quarantine;
    mod reconfigure;
    mod runbook;
    mod start;
    mod traces;
    mod upgrade;
}

/// The files of the source tree themselves.
mod repository {
    mod architecture;
    mod layout;
    mod levels;
    mod modules;
    mod readme;
    mod runbook;
    mod supply_chain;
}

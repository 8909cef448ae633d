//! Black-box tests: the core by its public API, on masters in memory and on real redis-servers.

mod admission;
mod cluster;
mod contract;
mod differential;
mod fencing;
mod gateway;
mod harness;
mod healing;
mod http_admission;
mod http_config;
mod http_errors;
mod http_fencing;
mod http_lifecycle;
mod http_locks;
mod http_metrics;
mod http_retries;
mod http_tls;
mod http_waiting;
mod http_waiting_gateways;
mod layout;
mod nodes;
mod openapi;
mod readme;
mod rules;
mod terms;
mod waiting;

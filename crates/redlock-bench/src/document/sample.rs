//! Reports for tests.

use super::{Report, Settings};
use crate::report::figures::{Figures, Latency};
use crate::report::{Machine, Source, StageReport};
use crate::workload::Workload;

/// So many requests a second, 10 µs of CPU time each, an acquire p50 of 1 ms.
pub(crate) fn figures(requests_per_second: f64) -> Figures {
    let latency = Some(Latency { p50_us: 1_000.0, p99_us: 2_000.0, p999_us: 3_000.0 });
    Figures {
        requests_per_second,
        server_cpu_us: 10.0,
        redis_cpu_us: 20.0,
        load_cpu_us: 5.0,
        acquire: latency,
        extend: None,
        release: latency,
        operations_per_call: None,
        refused_share: 0.0,
        memory_bytes: 1 << 20,
        peak_memory_bytes: 2 << 20,
        load_busy: 0.5,
        other_cores: 0.0,
        errors: 0,
        first_error: None,
    }
}

/// Without contenders.
pub(crate) fn stage(workload: Workload) -> StageReport {
    StageReport { workload, connections: 64, load_threads: 1, round_trip_us: None, contenders: Vec::new() }
}

pub(crate) fn report(workloads: Vec<StageReport>) -> Report {
    let text = |text: &str| text.to_owned();
    Report {
        machine: Machine { cores: 2, cpu: text("some CPU"), kernel: text("6.1.0"), redis: text("7.0.0") },
        source: Source { version: text("1.2.3"), commit: None, dirty: false, debug_build: false },
        date: text("2026-01-02T03:04:05Z"),
        settings: Settings { seconds: 3, rounds: 3, quick: false, only: Vec::new(), gateway_args: Vec::new() },
        workloads,
        contended: None,
        waiters: None,
        left_out: Vec::new(),
        failures: Vec::new(),
    }
}

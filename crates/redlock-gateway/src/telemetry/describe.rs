//! What the metrics mean, as scrapes say it.

use metrics::{
    Unit, describe_counter as counter, describe_gauge as gauge, describe_histogram as histogram,
};

pub(super) fn describe() {
    describe_nodes();
    histogram!(
        "redlock_acquire_duration_seconds",
        Unit::Seconds,
        "Time to decide an acquire, waiting excluded."
    );
    histogram!(
        "redlock_wait_duration_seconds",
        Unit::Seconds,
        "Time of requests that were ready to wait for a lock."
    );
    gauge!("redlock_waiters", "Requests that wait for a lock.");
    gauge!("redlock_waiting_locks", "Locks that requests wait for.");
    gauge!("redlock_waiters_limit", "How many requests may wait.");
    gauge!("redlock_requests_in_flight", "Requests being worked on, waiting ones not counted.");
    gauge!(
        "redlock_requests_in_flight_limit",
        "How many requests may be worked on at the same time."
    );
    gauge!("redlock_quorum", "How many nodes make a majority.");
    gauge!("redlock_ready", "1 when /readyz says that requests should be sent here, else 0.");
    counter!(
        "redlock_reload_failures_total",
        "Files that were read again and could not be used: what was in use stays."
    );
    gauge!(
        "redlock_certificate_expiry_timestamp_seconds",
        Unit::Seconds,
        "When the certificate in use ends, by the file that it came from."
    );
    gauge!("redlock_listings", "Listings under way.");
    counter!(
        "redlock_handoffs_total",
        "Locks that went from a release to a waiter: here, or by another gateway's hint."
    );
    counter!("redlock_operations_total", "Lock operations by outcome.");
    counter!(
        "redlock_quorum_failures_total",
        "Unusable node answers in operations that lacked a majority, by reason."
    );
    counter!(
        "redlock_releases_abandoned_total",
        "Releases that a node never confirmed and that were given up."
    );
    counter!(
        "redlock_fences_out_of_reach_total",
        "Fences so far ahead of this machine's clock that its tokens cannot pass them yet."
    );
    counter!(
        "redlock_audit_failures_total",
        "Writes to --audit-log that failed, and lines that found no room."
    );
    counter!(
        "redlock_log_lines_dropped_total",
        "Log lines that were lost: nobody read them, or the disk is full."
    );
    histogram!("redlock_batch_operations", "Operations carried by one call to a node.");
    histogram!(
        "http_server_request_duration_seconds",
        Unit::Seconds,
        "Time from request to answer."
    );
    counter!(
        "redlock_lock_group_operations_total",
        "Operations on the locks of a group of the configuration, by outcome."
    );
    histogram!(
        "redlock_lock_group_wait_duration_seconds",
        Unit::Seconds,
        "Time of requests that were ready to wait for a lock of a group."
    );
    gauge!(
        "redlock_clock_lead_seconds",
        Unit::Seconds,
        "How far fencing tokens run ahead of this machine's clock, learned from gateways whose clocks are ahead."
    );
    counter!(
        "redlock_quota_exceeded_total",
        "Requests refused because the masters' memory is short and the client takes its share."
    );
    gauge!("redlock_build_info", "Constant 1, labelled with the version.");
}

fn describe_nodes() {
    histogram!(
        "redlock_node_request_duration_seconds",
        Unit::Seconds,
        "Time of one call to a node, earlier calls on the way to it included."
    );
    counter!("redlock_node_votes_total", "Answers of a node to single operations.");
    gauge!("redlock_node_state", "1 for the state that a node is in, else 0.");
    gauge!(
        "redlock_node_voting",
        "1 for a node that can grant locks: admitted, its clock agrees, it takes writes. Else 0."
    );
    gauge!(
        "redlock_node_clock_offset_seconds",
        Unit::Seconds,
        "A node's clock minus this gateway's."
    );
    counter!("redlock_node_restarts_total", "Restarts of a node that this gateway has seen.");
    gauge!("redlock_node_used_memory_bytes", Unit::Bytes, "Memory that a node uses.");
    gauge!(
        "redlock_node_max_memory_bytes",
        Unit::Bytes,
        "Memory that a node may use: its maxmemory, or --master-memory where it has none."
    );
    gauge!("redlock_node_evicted_keys", "Keys that a node has evicted; above 0 locks may be lost.");
    gauge!(
        "redlock_node_quarantine_remaining_seconds",
        Unit::Seconds,
        "How long a node's quarantine still lasts; else 0."
    );
    counter!(
        "redlock_node_repairs_total",
        "Extended locks that were set again on a node that had lost them."
    );
}

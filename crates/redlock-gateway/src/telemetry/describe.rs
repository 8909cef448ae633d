//! Descriptions of the metrics, for the HELP lines of a scrape.

use metrics::{
    Unit, describe_counter as counter, describe_gauge as gauge, describe_histogram as histogram,
};

pub(super) fn describe() {
    describe_nodes();
    histogram!(
        "redlock_acquire_duration_seconds",
        Unit::Seconds,
        "Time until an acquire was decided, without the wait for the lock."
    );
    histogram!(
        "redlock_wait_duration_seconds",
        Unit::Seconds,
        "Duration of requests with wait_ms, until a grant or their end."
    );
    gauge!("redlock_waiters", "Requests that wait for a lock.");
    gauge!("redlock_kept_places", "Places in line that are kept for clients between two requests.");
    gauge!("redlock_waiting_locks", "Locks that at least one request waits for.");
    gauge!("redlock_waiters_limit", "Maximum number of waiting requests.");
    gauge!(
        "redlock_requests_in_flight",
        "Requests in flight, not counting those that wait for a lock."
    );
    gauge!("redlock_requests_in_flight_limit", "Maximum number of requests in flight.");
    gauge!("redlock_quorum", "Number of nodes that make a majority.");
    gauge!("redlock_ready", "1 while /readyz answers 200, else 0.");
    counter!(
        "redlock_reload_failures_total",
        "Files that were read again and could not be used. The old content stays in use."
    );
    gauge!(
        "redlock_certificate_expiry_timestamp_seconds",
        Unit::Seconds,
        "When the certificate in use expires, by its file. Seconds since 1970."
    );
    gauge!("redlock_listings", "Listings under way.");
    gauge!("redlock_event_streams", "Open event streams, of watchers and of holders.");
    gauge!(
        "redlock_event_streams_limit",
        "How many event streams there may be, beside the requests that wait now."
    );
    gauge!(
        "redlock_deferred_requests",
        "Deferred requests (`POST /requests`) that wait for their lock or for its claim."
    );
    counter!("redlock_callbacks_total", "Attempts to send a callback, by outcome.");
    counter!(
        "redlock_handoffs_total",
        "Locks handed from a release to a waiter: local, or by a hint of another gateway (remote)."
    );
    counter!("redlock_operations_total", "Lock operations by outcome.");
    counter!(
        "redlock_quorum_failures_total",
        "Failed node answers in operations that lacked a majority, by reason."
    );
    counter!(
        "redlock_releases_abandoned_total",
        "Releases that were given up because a node never confirmed them."
    );
    counter!(
        "redlock_fences_out_of_reach_total",
        "Token watermarks so far ahead of this machine's clock that its tokens cannot exceed them yet."
    );
    counter!(
        "redlock_audit_failures_total",
        "Failed writes to --audit-log, and lines that found its queue full."
    );
    counter!(
        "redlock_log_lines_dropped_total",
        "Log lines that were lost: nobody read them, or the disk is full."
    );
    histogram!("redlock_batch_operations", "Operations in one call to a node.");
    histogram!(
        "http_server_request_duration_seconds",
        Unit::Seconds,
        "Time from the request to its answer."
    );
    counter!(
        "redlock_lock_group_operations_total",
        "Operations on the locks of a configured group, by outcome."
    );
    histogram!(
        "redlock_lock_group_wait_duration_seconds",
        Unit::Seconds,
        "Duration of requests with wait_ms for locks of a configured group, until a grant or their end."
    );
    gauge!(
        "redlock_clock_lead_seconds",
        Unit::Seconds,
        "How far fencing tokens run ahead of this machine's clock, after contact with gateways whose clocks are ahead."
    );
    counter!(
        "redlock_quota_exceeded_total",
        "Requests refused because the masters' memory is short and the client has used up its share."
    );
    gauge!(
        "redlock_quota_use_ratio",
        "The largest part of its share of the masters' memory that a client used in the last minutes. 0 while memory is not short."
    );
    gauge!(
        "redlock_auth_key_expiry_timestamp_seconds",
        Unit::Seconds,
        "When the next API key expires, 0 if none will. Seconds since 1970."
    );
    gauge!("redlock_public_url_info", "Always 1, with --public-url as a label.");
    gauge!("redlock_build_info", "Always 1, with the version as a label.");
}

fn describe_nodes() {
    histogram!(
        "redlock_node_request_duration_seconds",
        Unit::Seconds,
        "Duration of one call to a node, including the wait for earlier calls."
    );
    counter!("redlock_node_votes_total", "Answers of a node to single operations, by vote.");
    gauge!("redlock_node_state", "1 for the current state of a node, 0 for the others.");
    gauge!(
        "redlock_node_voting",
        "1 if a node can grant locks: it is admitted, its clock agrees and it takes writes. Else 0."
    );
    gauge!(
        "redlock_node_clock_offset_seconds",
        Unit::Seconds,
        "Clock of a node minus the clock of this gateway."
    );
    counter!("redlock_node_restarts_total", "Restarts of a node that this gateway has seen.");
    gauge!("redlock_node_used_memory_bytes", Unit::Bytes, "Memory that a node uses.");
    gauge!(
        "redlock_node_max_memory_bytes",
        Unit::Bytes,
        "Memory limit of a node: its maxmemory, or --master-memory if it sets none."
    );
    gauge!(
        "redlock_node_evicted_keys",
        "Keys that a node has evicted. Above 0, locks may be lost."
    );
    gauge!(
        "redlock_node_quarantine_remaining_seconds",
        Unit::Seconds,
        "Time left of a node's quarantine, 0 without a quarantine."
    );
    counter!(
        "redlock_node_repairs_total",
        "Extended locks that were set again on a node that had lost them."
    );
}

//! Whether a connected master may vote. Pure: facts in, a verdict out; `node/redis.rs` gathers the facts and acts.
//!
//! A master is fit when it is a master, is a Redis that has what the scripts need, and never evicts keys. Its *marker*, a
//! key without expiry, says for which configuration and for which process it was admitted: lock operations are refused
//! by the scripts when it is missing or differs, which catches FLUSHALL, an empty restart, a foreign data set after
//! REPLICAOF, and gateways that are configured with another node set or maximum TTL.
//!
//! What is not here yet: the quarantine. A node whose marker is missing is admitted at once, so a master that lost its
//! data while locks were held can help to grant them a second time. Run masters with `appendonly yes` and
//! `appendfsync always` where that matters.

use std::time::Duration;

use sha2::{Digest, Sha256};

/// What a node says about itself on connection.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Identity of the process: 40 hexadecimal digits, new on every start.
    pub run_id: String,
    /// Redis' version.
    pub version: String,
    /// `master` or `slave`.
    pub role: String,
    /// `maxmemory-policy`; empty when the node did not say.
    pub policy: String,
    /// Keys evicted since it started.
    pub evicted_keys: u64,
    /// Whether the append-only file is on; `None` when the node did not say.
    pub append_only: Option<bool>,
}

impl Facts {
    /// Reads the answer of INFO.
    pub fn from_info(info: &str) -> Self {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or_default().trim()
        };
        Self {
            run_id: field("run_id").into(),
            version: field("redis_version").into(),
            role: field("role").into(),
            policy: field("maxmemory_policy").into(),
            evicted_keys: field("evicted_keys").parse().unwrap_or(0),
            append_only: match field("aof_enabled") {
                "1" => Some(true),
                "0" => Some(false),
                _ => None,
            },
        }
    }

    /// Why this node must not vote, if so: what was found and what an operator can do.
    pub fn unfit(&self) -> Option<String> {
        let major: Option<u32> = self.version.split('.').next().and_then(|major| major.parse().ok());
        if self.run_id.len() != 40 || !self.run_id.bytes().all(|b| b.is_ascii_hexdigit()) {
            Some("INFO gives no run_id, so a restart could not be noticed; allow INFO for the gateway's user".into())
        } else if major.is_none_or(|major| major < 7) {
            Some(format!("Redis {} is too old; 7.0 or newer is needed (SET with NX and GET)", self.version))
        } else if self.role != "master" {
            Some(format!("its role is {:?}; only masters vote (REPLICAOF NO ONE makes it one)", self.role))
        } else if !matches!(self.policy.as_str(), "noeviction" | "") {
            Some(format!(
                "maxmemory-policy is {}, which may evict locks; CONFIG SET maxmemory-policy noeviction",
                self.policy
            ))
        } else {
            None
        }
    }
}

/// What every gateway of one cluster agrees on, as the marker states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    config: String,
}

impl Generation {
    /// `cluster` names the node set; two gateways with different clusters or maximum TTLs never vote side by side.
    pub fn new(cluster: &str, max_ttl: Duration) -> Self {
        let digest = Sha256::digest(cluster.as_bytes());
        let node_set: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { config: format!("v1:{node_set}:{}:", max_ttl.as_millis()) }
    }

    /// The name of a node set: the given nodes, in any order.
    pub fn cluster_of_nodes<'a>(nodes: impl IntoIterator<Item = &'a str>) -> String {
        let mut nodes: Vec<_> = nodes.into_iter().collect();
        nodes.sort_unstable();
        nodes.join(",")
    }

    /// The part of the marker that is equal on all nodes.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// The marker of one process.
    pub fn marker(&self, run_id: &str) -> String {
        format!("{}{run_id}", self.config)
    }

    /// The hash of the node set, as markers have it.
    pub fn node_set(&self) -> &str {
        Self::node_set_of(&self.config).unwrap_or_default()
    }

    /// The marker that stands while a change of configuration is under way: of no node set, so that nobody accepts it,
    /// with the node set that is being left and the longest TTL that its locks can have.
    pub fn marker_under_way(left: &str, longest_ttl: Duration) -> String {
        format!("v1:{UNDER_WAY}{left}:{}:", longest_ttl.as_millis())
    }

    /// The node set that a marker was written for; of a change under way, the one that is being left.
    pub fn node_set_of(marker: &str) -> Option<&str> {
        let node_set = marker.strip_prefix("v1:")?.split(':').next()?;
        Some(node_set.strip_prefix(UNDER_WAY).unwrap_or(node_set))
    }

    /// Why a marker that stands on a node keeps it from voting, naming both configurations.
    pub fn conflict(&self, marker: &str) -> String {
        let stands = describe(marker).unwrap_or_else(|| format!("{marker:?}, which is no marker of this program"));
        let ours = describe(&self.config).unwrap_or_default();
        format!(
            "its marker is of another configuration: it has {stands}, this gateway has {ours}; \
             after an intended change run `redlock-gateway reconfigure`"
        )
    }

    /// The maximum TTL that a marker was written for.
    pub fn max_ttl_of(marker: &str) -> Option<Duration> {
        marker.split(':').nth(2)?.parse().ok().map(Duration::from_millis)
    }
}

/// Before the hash of a node set that is being left.
const UNDER_WAY: &str = "leaving-";

fn describe(marker: &str) -> Option<String> {
    let mut parts = marker.split(':');
    let (version, node_set) = (parts.next()?, parts.next()?);
    let max_ttl = Generation::max_ttl_of(marker)?;
    if version != "v1" {
        return None;
    }
    Some(if node_set.starts_with(UNDER_WAY) {
        "a change of configuration under way (`redlock-gateway reconfigure` was started and has not ended)".into()
    } else {
        format!("node set {node_set}, max_ttl {} ms", max_ttl.as_millis())
    })
}

/// The marker key under a prefix. The braces keep it apart from every lock key.
pub fn marker_key(prefix: &str) -> String {
    format!("{{{prefix}}}:marker")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit() -> Facts {
        Facts::from_info(&format!(
            "# Server\r\nredis_version:7.0.15\r\nrun_id:{}\r\n# Replication\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n\
             evicted_keys:0\r\naof_enabled:0\r\n",
            "a".repeat(40)
        ))
    }

    #[test]
    fn a_plain_master_is_fit_and_each_defect_alone_makes_it_unfit() {
        assert_eq!(fit().unfit(), None);
        assert_eq!(fit().append_only, Some(false));
        for (defect, word) in [
            (Facts { run_id: String::new(), ..fit() }, "run_id"),
            (Facts { version: "6.2.7".into(), ..fit() }, "too old"),
            (Facts { role: "slave".into(), ..fit() }, "REPLICAOF NO ONE"),
            (Facts { policy: "allkeys-lru".into(), ..fit() }, "allkeys-lru"),
        ] {
            assert!(defect.unfit().unwrap().contains(word), "{defect:?}");
        }
    }

    #[test]
    fn generations_differ_in_node_set_and_max_ttl_and_not_in_node_order() {
        let ttl = Duration::from_secs(300);
        let nodes = Generation::cluster_of_nodes(["b:2", "a:1"]);
        assert_eq!(nodes, Generation::cluster_of_nodes(["a:1", "b:2"]));
        let base = Generation::new(&nodes, ttl);
        let other_ttl = Generation::new(&nodes, ttl * 2);
        assert_ne!(base, other_ttl);
        assert_ne!(base, Generation::new("a:1", ttl));
        let conflict = base.conflict(&other_ttl.marker("run"));
        let under_way = Generation::marker_under_way(base.node_set(), ttl * 3);
        assert_eq!(Generation::node_set_of(&under_way), Some(base.node_set()));
        assert_eq!(Generation::max_ttl_of(&under_way), Some(ttl * 3));
        assert!(base.conflict(&under_way).contains("under way"));
        assert!(conflict.contains("max_ttl 600000 ms") && conflict.contains("max_ttl 300000 ms"), "{conflict}");
    }
}

//! A node's report about itself, and whether that alone makes the node ineligible.

use std::fmt;

use crate::node::status::{Diagnosis, Remedy};

/// A node's report about itself, from INFO and CONFIG GET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Identity of the process: 40 hexadecimal digits, new at every start.
    pub run_id: String,
    /// The version of Redis that the node is compatible with. Redis reports its own version here.
    pub version: String,
    /// The program and its own version, such as `Redis 7.0.15` or `Valkey 9.1.2`.
    pub server: String,
    /// `master` or `slave`; empty when unreported.
    pub role: String,
    /// `maxmemory-policy`; empty when unreported.
    pub policy: String,
    /// Keys evicted since the process started.
    pub evicted_keys: u64,
    /// How much a crash of the node would lose.
    pub durability: Durability,
    /// Whether the append-only file was rewritten since the process started. A rewritten file may
    /// differ from the loaded one.
    pub rewritten: bool,
    /// `master_replid`: new at every promotion.
    pub replication_id: String,
    /// Whether this process has been a replica. Its data may then be another node's, or lag behind.
    pub was_replica: bool,
    /// The node's wall clock, in microseconds since 1970; 0 when unreported.
    pub time_micros: u64,
    /// `used_memory`, in bytes; 0 when unreported.
    pub used_memory: u64,
    /// `maxmemory`, in bytes; 0 when the node has no limit or reports none.
    pub max_memory: u64,
    /// The hash slots that the node serves, as CLUSTER NODES shows them; `None` outside Cluster mode.
    pub cluster_slots: Option<String>,
}

/// How much a crash of a node would lose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Durability {
    /// Nothing: every write is on disk before its acknowledgement.
    Durable,
    /// Nothing once the current rewrite of the append-only file has ended.
    Settling,
    /// The newest writes or all of them; contains the setting that causes it.
    Volatile(&'static str),
    /// Unknown; contains the node's answer.
    Unknown(String),
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Durable => f.write_str("every write is synced to disk"),
            Self::Settling => {
                f.write_str("every write is synced to disk once the rewrite under way has ended")
            }
            Self::Volatile(why) => write!(f, "a crash can lose locks ({why})"),
            Self::Unknown(why) => write!(f, "durability unknown ({why})"),
        }
    }
}

/// The settings that [`Facts::new`] needs from CONFIG GET.
pub const SETTINGS: [&str; 4] =
    ["appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy"];

/// All slots of a cluster, as CLUSTER NODES shows them.
const ALL_SLOTS: &str = "0-16383";

impl Facts {
    /// Reads the answers to INFO and to CONFIG GET of [`SETTINGS`]. Managed services often forbid
    /// CONFIG. Then the durability is unknown, and every restart means a quarantine.
    pub fn new(info: &str, settings: Result<&[(String, String)], &str>) -> Self {
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .unwrap_or_default()
                .trim()
        };
        let setting = |name: &str| {
            let pairs = settings.unwrap_or_default();
            pairs.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value.as_str())
        };
        let policy = [field("maxmemory_policy"), setting("maxmemory-policy")]
            .into_iter()
            .find(|text| !text.is_empty());
        let is_rewriting =
            field("aof_rewrite_in_progress") != "0" || field("aof_rewrite_scheduled") != "0";
        let durability = match (settings, setting("appendonly"), setting("appendfsync")) {
            (Err(why), _, _) => Durability::Unknown(format!("CONFIG GET: {why}")),
            (Ok(_), "no", _) => Durability::Volatile("appendonly no"),
            (Ok(_), "yes", "everysec" | "no") => Durability::Volatile("appendfsync is not always"),
            (Ok(_), "yes", "always") => match setting("no-appendfsync-on-rewrite") {
                "no" if is_rewriting || field("aof_last_bgrewrite_status") != "ok" => {
                    Durability::Settling
                }
                "no" => Durability::Durable,
                _ => Durability::Volatile("no-appendfsync-on-rewrite is not no"),
            },
            (Ok(_), _, _) => {
                Durability::Unknown("CONFIG GET does not show appendonly and appendfsync".into())
            }
        };
        // Valkey reports a version of Redis too: the last one that it is compatible with.
        let server = match (field("valkey_version"), field("redis_version")) {
            ("", redis) => format!("Redis {redis}"),
            (valkey, _) => format!("Valkey {valkey}"),
        };
        Self {
            run_id: field("run_id").into(),
            version: field("redis_version").into(),
            server,
            role: field("role").into(),
            policy: policy.unwrap_or_default().into(),
            evicted_keys: field("evicted_keys").parse().unwrap_or(0),
            durability,
            rewritten: is_rewriting || field("aof_rewrites") != "0",
            replication_id: field("master_replid").into(),
            was_replica: field("master_replid2").bytes().any(|byte| byte != b'0'),
            time_micros: field("server_time_usec").parse().unwrap_or(0),
            used_memory: field("used_memory").parse().unwrap_or(0),
            max_memory: field("maxmemory").parse().unwrap_or(0),
            cluster_slots: (field("cluster_enabled") == "1").then(String::new),
        }
    }

    /// Reads the node's slots from its answer to CLUSTER NODES.
    pub fn read_cluster_slots(&mut self, nodes: &str) {
        let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let is_own = |fields: &Vec<String>| fields.get(2).is_some_and(|own| own.contains("myself"));
        let own = nodes.lines().map(fields).find(is_own).unwrap_or_default();
        self.cluster_slots = Some(own.get(8..).unwrap_or_default().join(" "));
    }

    /// Whether the node serves every key.
    pub fn serves_all_slots(&self) -> bool {
        self.cluster_slots.as_deref().is_none_or(|slots| slots == ALL_SLOTS)
    }

    /// An eligible master that syncs nothing, for tests.
    #[cfg(test)]
    pub(crate) fn volatile_master() -> Self {
        Self {
            run_id: "a".repeat(40),
            version: "7.0.15".into(),
            server: "Redis 7.0.15".into(),
            role: "master".into(),
            policy: "noeviction".into(),
            evicted_keys: 0,
            durability: Durability::Volatile("appendonly no"),
            rewritten: false,
            replication_id: "c".repeat(40),
            was_replica: false,
            time_micros: 0,
            used_memory: 1 << 20,
            max_memory: 0,
            cluster_slots: None,
        }
    }

    /// Whether nothing has happened between the two reports that makes the node's memory of locks
    /// suspect. The caller must also check that the node's marker is unchanged.
    pub(crate) fn has_same_history(&self, later: &Self) -> bool {
        self.run_id == later.run_id
            && self.role == later.role
            && self.replication_id == later.replication_id
            && self.evicted_keys == later.evicted_keys
    }

    /// Why this node must not vote, whatever its marker says; `None` when it may.
    pub fn ineligible(&self) -> Option<Diagnosis> {
        let major: Option<u32> =
            self.version.split('.').next().and_then(|major| major.parse().ok());
        if self.run_id.len() != 40 || !self.run_id.bytes().all(|b| b.is_ascii_hexdigit()) {
            Some(Diagnosis::new(
                "INFO shows no run_id, so a restart could not be noticed",
                Remedy::AllowInfo,
            ))
        } else if major.is_none_or(|major| major < 7) {
            let why = format!("{} is too old: SET with NX and GET is needed", self.server);
            Some(Diagnosis::new(why, Remedy::UpgradeRedis))
        } else if self.role.is_empty() {
            Some(Diagnosis::new(
                "INFO shows no role, so a replica could not be noticed",
                Remedy::AllowInfo,
            ))
        } else if self.role != "master" {
            let why = format!("its role is {:?}; only masters vote", self.role);
            Some(Diagnosis::new(why, Remedy::MakeMaster))
        } else if !self.serves_all_slots() {
            let slots = self.cluster_slots.as_deref().filter(|slots| !slots.is_empty());
            let slots = slots.map_or("no slot".into(), |slots| format!("only the slots {slots}"));
            let why = format!("it is in Cluster mode and serves {slots}; locks need {ALL_SLOTS}");
            Some(Diagnosis::new(why, Remedy::ServeAllSlots))
        } else if self.policy.is_empty() {
            let why = "neither INFO nor CONFIG GET shows maxmemory-policy, so it may evict locks";
            Some(Diagnosis::new(why, Remedy::AllowInfo))
        } else if self.policy != "noeviction" {
            let why = format!("maxmemory-policy is {}, which may evict locks", self.policy);
            Some(Diagnosis::new(why, Remedy::ForbidEvictions))
        } else {
            None
        }
    }
}

//! The state of nodes and gateways.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use redlock_core::clock::Entropy;
use redlock_core::node::eligibility::{
    Durability, Eligibility as Decisions, Facts, incarnation_of,
};

use super::bounds::GATEWAYS;
use crate::rules::Rules;

/// The content of a node's memory or of one of its files.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Stored {
    pub(super) marker: Option<String>,
    pub(super) locks: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Site {
    pub(super) process: u8,
    pub(super) memory: Stored,
    pub(super) dump: Option<Stored>,
    pub(super) append_only_file: Stored,
    /// Every write goes to the append-only file before the node acknowledges it.
    pub(super) synced: bool,
    /// The append-only file was rewritten from memory since the process started.
    pub(super) rewritten: bool,
    pub(super) evicted: u8,
    /// How far the operator has raised the marker: not yet, its bound, or its limit too.
    pub(super) raised: u8,
    /// The node has lost data since its marker was written.
    pub(super) is_suspect: bool,
    /// The locks that the node has granted.
    pub(super) granted: u8,
    /// The locks that the last restart brought back.
    pub(super) survived: u8,
    pub(super) views: [NodeView; GATEWAYS],
}

/// One node as one gateway sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct NodeView {
    pub(super) eligibility: Decisions,
    /// The incarnation that the gateway sends with operations. It lasts as long as the gateway's
    /// connection.
    pub(super) session: Option<String>,
    /// What the gateway saw at its latest probe. Its time does not count.
    pub(super) seen: Option<(Option<Duration>, Duration)>,
    /// The other nodes that the gateway has probed since it began to count the quarantine, one bit
    /// each.
    pub(super) probed_since: u8,
    /// A marker write on its way to the node: the marker that must still stand there, and its
    /// replacement.
    pub(super) put: Option<(Option<String>, String)>,
    pub(super) waits: Option<Waits>,
    /// The marker of a quarantine that this gateway has confirmed as one of a new cluster. Such a
    /// quarantine needs no waiting.
    pub(super) confirmed_new: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Waits {
    pub(super) marker: String,
    pub(super) is_new: bool,
    /// The leases that ran when the gateway began to count the quarantine.
    pub(super) leases: u8,
    /// How much longer than by its own `max_ttl` the gateway waits.
    pub(super) longer_by: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Gateway {
    /// Whether the gateway was started with `--bootstrap`.
    pub(super) bootstrap: bool,
    /// Whether the gateway may still confirm that the cluster is new.
    pub(super) may_confirm_new: bool,
    /// Whether the gateway takes a node without a marker for one that lost its data, not for a new
    /// one. A gateway does so if it was started without `--bootstrap`, or once it has admitted a
    /// node.
    pub(super) denies_new: bool,
    /// Whether the gateway has the new configuration.
    pub(super) is_new: bool,
    pub(super) is_stopped: bool,
}

/// The operator's change of configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Change {
    Before,
    /// The change has begun. The number holds the leases that ran then, one bit each.
    UnderWay(u8),
    Done,
}

/// Nodes, gateways, the running leases, and how many faults and gateway restarts may still happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub(super) sites: Vec<Site>,
    pub(super) gateways: [Gateway; GATEWAYS],
    pub(super) change: Change,
    /// The running leases, one bit each.
    pub(super) live: u8,
    /// The running leases with the shorter `max_ttl`.
    pub(super) short: u8,
    pub(super) faults_left: u8,
    pub(super) restarts_left: u8,
    /// Whether a quarantine of a new cluster was waited out instead of being confirmed as new.
    pub(super) has_waited: bool,
}

/// An entropy source that returns one number.
pub(super) struct Nonce(pub(super) u64);

impl Entropy for Nonce {
    fn fill(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0.to_le_bytes()[..buffer.len()]);
    }
}

/// The first nonce. It is larger than every other number in markers, so a search for it in a
/// marker's text finds only nonces.
pub(super) const NONCES: u64 = 0xace0_0000;

fn run_id(process: u8) -> String {
    format!("{process:040x}")
}

/// Collects the bytes that are hashed. This shows the texts that an eligibility stores, which have
/// no other accessor.
#[derive(Default)]
struct Texts(Vec<u8>);

impl Hasher for Texts {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }
    fn finish(&self) -> u64 {
        0
    }
}

fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Hash for State {
    /// States that differ only in the order of nodes or of gateways have the same hash. So the
    /// checker merges them.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let Self { sites, gateways, change, live, short, faults_left, restarts_left, has_waited } =
            self;
        let sites: Vec<_> = sites.iter().map(Site::digests).collect();
        let seen_in = |order: [usize; GATEWAYS]| {
            let sites = sites
                .iter()
                .map(|(node, views)| digest(&(node, order.map(|gateway| views[gateway]))));
            digest(&(sites.fold(0, u64::wrapping_add), order.map(|gateway| gateways[gateway])))
        };
        let sites = seen_in([0, 1]).wrapping_add(seen_in([1, 0]));
        (sites, change, live, short, faults_left, restarts_left, has_waited).hash(hasher);
    }
}

impl State {
    pub(super) fn grant(&mut self, nodes: u8, is_short: bool) {
        let lock = self.fresh_lease();
        for (_, site) in
            self.sites.iter_mut().enumerate().filter(|(node, _)| nodes & (1 << node) != 0)
        {
            site.write(|stored| stored.locks |= lock);
            site.granted |= lock;
        }
        self.live |= lock;
        self.short |= if is_short { lock } else { 0 };
    }

    pub(super) fn end(&mut self, lock: u8) {
        self.live &= !lock;
        self.short &= self.live;
        for site in &mut self.sites {
            for stored in
                [&mut site.memory, &mut site.append_only_file].into_iter().chain(&mut site.dump)
            {
                stored.locks &= self.live;
            }
            site.granted &= self.live;
            site.survived &= self.live;
        }
    }

    /// Spends one fault on a node.
    pub(super) fn fail(&mut self, node: u8) -> &mut Site {
        self.faults_left -= 1;
        &mut self.sites[usize::from(node)]
    }

    /// The bit of a lease that does not run and that neither a quarantine count nor the change of
    /// configuration waits for.
    pub(super) fn fresh_lease(&self) -> u8 {
        let waits = self.sites.iter().flat_map(|site| &site.views).flat_map(|view| &view.waits);
        let counted = waits.fold(0, |leases, waits| leases | waits.leases);
        let under_way = if let Change::UnderWay(leases) = self.change { leases } else { 0 };
        1 << (self.live | counted | under_way).trailing_ones()
    }

    /// Whether the node votes for the gateway: the gateway's session shows the marker that stands
    /// on the node.
    pub(super) fn votes(&self, gateway: usize, node: usize) -> bool {
        let site = &self.sites[node];
        let session = &site.views[gateway].session;
        session.is_some() && session.as_deref() == site.memory.marker.as_deref().map(incarnation_of)
    }

    /// Whether the gateway waits for a node that it takes for new, and the marker of that
    /// quarantine still stands on the node.
    pub(super) fn waits_for_new(&self, gateway: usize, node: usize) -> bool {
        let site = &self.sites[node];
        let waits = site.views[gateway].waits.as_ref();
        waits
            .is_some_and(|waits| waits.is_new && Some(&waits.marker) == site.memory.marker.as_ref())
    }
}

impl Site {
    /// A nonce that no marker in this site or its views contains. Reusing such nonces keeps the
    /// number of states finite.
    pub(super) fn fresh_nonce(&self) -> Nonce {
        let remembered = self.remembered();
        let mut nonces = (NONCES..).filter(|nonce| !remembered.contains(&format!("{nonce:x}")));
        Nonce(nonces.next().expect("there are many"))
    }

    fn fresh_process(&self) -> u8 {
        let remembered = self.remembered();
        let is_fresh =
            |process: &u8| *process != self.process && !remembered.contains(&run_id(*process));
        (0..u8::MAX).find(is_fresh).expect("there are many")
    }

    /// All texts in this site and in the gateways' views of it, in any order.
    fn remembered(&self) -> String {
        let mut texts = Texts::default();
        self.hash(&mut texts);
        String::from_utf8_lossy(&texts.0).into_owned()
    }

    pub(super) fn facts(&self, rules: &Rules) -> Facts {
        let process = if rules.admission_names_process { self.process } else { 0 };
        Facts {
            run_id: run_id(process),
            version: "7.0.15".into(),
            server: "Redis 7.0.15".into(),
            role: "master".into(),
            policy: "noeviction".into(),
            evicted_keys: if rules.evictions_are_counted { self.evicted.into() } else { 0 },
            durability: if self.synced {
                Durability::Durable
            } else {
                Durability::Volatile("appendonly no")
            },
            rewritten: self.rewritten && rules.rewrite_is_noticed,
            replication_id: "0".repeat(40),
            was_replica: false,
            time_micros: 0,
            used_memory: 0,
            max_memory: 0,
            cluster_slots: None,
        }
    }

    /// One digest for the node, and one for each gateway's view of it.
    fn digests(&self) -> (u64, [u64; GATEWAYS]) {
        let Self {
            process,
            memory,
            dump,
            append_only_file,
            synced,
            rewritten,
            evicted,
            raised,
            is_suspect,
            granted,
            survived,
            views,
        } = self;
        let stored = (process, memory, dump, append_only_file);
        let node = (stored, synced, rewritten, evicted, raised, is_suspect, granted, survived);
        (digest(&node), std::array::from_fn(|gateway| digest(&views[gateway])))
    }

    pub(super) fn write(&mut self, change: impl FnOnce(&mut Stored)) {
        change(&mut self.memory);
        if self.synced {
            self.append_only_file.clone_from(&self.memory);
        }
    }

    pub(super) fn put(&mut self, marker: String) {
        self.write(|stored| stored.marker = Some(marker));
        self.is_suspect = false;
    }

    /// The gateway's marker arrives. It replaces the marker that the gateway expects there, and
    /// nothing else. A restart drops the write, so the arrival also shows that the process is still
    /// the same.
    pub(super) fn put_of(&mut self, gateway: usize) {
        if let Some((from, to)) = self.views[gateway].put.take()
            && self.memory.marker == from
        {
            self.put(to);
        }
    }

    pub(super) fn evict(&mut self) {
        self.write(|stored| stored.locks = 0);
        (self.evicted, self.is_suspect) = (self.evicted + 1, true);
        self.end_sessions();
    }

    /// The node begins or ceases to sync every write. When it begins, its append-only file is
    /// rewritten from memory. Otherwise the file stays as it is.
    pub(super) fn sync(&mut self, on: bool) {
        (self.synced, self.rewritten) = (on, self.rewritten || on);
        self.write(|_| {});
        self.end_sessions();
    }

    fn end_sessions(&mut self) {
        self.views.iter_mut().for_each(|view| view.session = None);
    }

    /// The process and its connections end, and a new process starts.
    pub(super) fn restart(&mut self, empty: bool, synced: bool) {
        if empty {
            (self.dump, self.append_only_file) = Default::default();
        }
        let file = if synced {
            self.append_only_file.clone()
        } else {
            self.dump.clone().unwrap_or_default()
        };
        self.is_suspect = self.memory != file;
        self.memory = file;
        self.process = self.fresh_process();
        self.survived = self.memory.locks;
        (self.synced, self.rewritten) = (synced, false);
        self.evicted = 0;
        self.end_sessions();
        self.views.iter_mut().for_each(|view| view.put = None);
    }
}

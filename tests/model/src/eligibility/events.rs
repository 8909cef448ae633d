//! The events and their effects.

use std::time::Duration;

use redlock_core::node::eligibility::{
    BoundRules, EarlyEnd, Eligibility as Decisions, Moment, NextStep, Peer, Peers, Suspicion,
    TtlBounds, incarnation_of,
};
use redlock_core::quorum::{Decision, Tally};

use super::bounds::{BEGINNING, Eligibility, GATEWAYS, QUARANTINE};
use super::state::{Change, Gateway, NONCES, NodeView, Nonce, Site, State, Stored, Waits};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// These nodes, one bit each, grant a new lock to a client of the gateway.
    Grant { gateway: u8, nodes: u8 },
    /// A lease ends, and its lock disappears from all nodes.
    End(u8),
    /// A node writes a dump of its data.
    Save(u8),
    /// A node loses all its data in place.
    Flush(u8),
    /// A node restarts: empty, with its append-only file (`synced`), or with its dump. The new
    /// process syncs every write if `synced`.
    Restart { node: u8, empty: bool, synced: bool },
    /// A node evicts a lock.
    Evict(u8),
    /// A node begins or ceases to sync every write.
    Sync { node: u8, on: bool },
    /// A gateway probes a node.
    Probe { gateway: u8, node: u8 },
    /// A gateway probes a node at the moment when its count of the node's quarantine has ended.
    ProbeAtEnd { gateway: u8, node: u8 },
    /// The marker that a gateway sent arrives at a node.
    Put { gateway: u8, node: u8 },
    /// A gateway confirms that the cluster is new.
    Confirm(u8),
    /// A gateway restarts with its old configuration.
    RestartGateway(u8),
    /// The operator stops the votes of the old configuration.
    Reconfigure,
    /// The operator raises the bound in a node's marker, or its limit once all bounds are raised.
    Raise(u8),
    /// The operator has waited for the old locks to end, and writes the new configuration's
    /// markers.
    Reconfigured,
}

impl Eligibility {
    /// A node as a starting gateway sees it.
    pub(super) fn view(&self, gateway: Gateway) -> NodeView {
        let eligibility = self.decisions(gateway.is_new).expecting_bootstrap(gateway.bootstrap);
        NodeView {
            eligibility,
            session: None,
            seen: None,
            probed_since: 0,
            put: None,
            waits: None,
            confirmed_new: None,
        }
    }

    /// Every process counts as the one that the node's name leads to, because a process and its
    /// connections are gone before the next one starts.
    fn decisions(&self, is_new: bool) -> Decisions {
        Decisions::new(self.identity(is_new).clone(), QUARANTINE, Duration::ZERO)
            .returning_after(Duration::ZERO)
            .with_rules(BoundRules {
                larger_bound_is_waited: self.rules.larger_bound_is_waited,
                majority_is_probed: self.rules.majority_is_probed,
                limit_is_checked: self.rules.limit_is_checked,
            })
    }

    fn start(&self, s: &mut State, gateway: usize) {
        let g = &mut s.gateways[gateway];
        (g.may_confirm_new, g.denies_new, g.is_stopped) = (g.bootstrap, !g.bootstrap, false);
        let view = self.view(*g);
        s.sites.iter_mut().for_each(|site| site.views[gateway] = view.clone());
    }

    /// A gateway probes a node. If the probe leads to a new marker, the gateway writes it and
    /// probes again.
    fn probe(&self, s: &mut State, gateway: usize, node: usize, now: Duration) {
        self.probe_once(s, gateway, node, now);
        while !self.bounds.every_order && s.sites[node].views[gateway].put.is_some() {
            s.sites[node].put_of(gateway);
            self.probe_once(s, gateway, node, now);
        }
    }

    fn probe_once(&self, s: &mut State, gateway: usize, node: usize, now: Duration) {
        let seen = self.peers(s, gateway, node);
        let g = &mut s.gateways[gateway];
        let site = &mut s.sites[node];
        let facts = site.facts(&self.rules);
        let marker = site.memory.marker.clone();
        let nonce =
            if self.rules.quarantine_has_nonce { site.fresh_nonce() } else { Nonce(NONCES) };
        let view = &mut site.views[gateway];
        if !self.rules.bootstrap_ends_with_admission {
            view.eligibility = view.eligibility.clone().expecting_bootstrap(g.bootstrap);
        }
        let is_this = view.confirmed_new == marker || !self.rules.bootstrap_names_quarantine;
        let confirmed_new = view.confirmed_new.is_some() && is_this;
        view.seen = view
            .eligibility
            .as_peer(&facts, marker.as_deref(), Duration::ZERO, view.seen.unwrap_or_default().1)
            .map(|peer| (peer.limit, peer.bound))
            .or(view.seen);
        let counted = view.waits.take().map(|waits| waits.marker);
        (view.session, view.put) = (None, None);
        let now = Moment { monotonic: now, wall_micros: 0 };
        let confirmed_new = confirmed_new.then_some(EarlyEnd::BrandNew);
        let peers = Peers { seen: &seen, needed: self.quorum.size() - 1 };
        let decisions = &mut view.eligibility;
        match decisions.next_step(&facts, marker.as_deref(), now, peers, confirmed_new, &nonce) {
            NextStep::Refuse(_) => {}
            NextStep::Put { from, to } => view.put = Some((from, to)),
            NextStep::Wait { until, suspicion, .. } => {
                let marker = marker.expect("a gateway waits only for a marked node");
                let is_same = counted
                    .is_some_and(|counted| incarnation_of(&counted) == incarnation_of(&marker));
                if !is_same {
                    view.probed_since = 0;
                }
                let after = until - QUARANTINE - BEGINNING;
                let leases = after.subsec_millis() as u8;
                let longer_by = Duration::from_secs(after.as_secs());
                let is_new = suspicion == Suspicion::New;
                view.waits = Some(Waits { marker, is_new, leases, longer_by });
            }
            NextStep::Admit { marker } => {
                g.denies_new |= self.rules.bootstrap_ends_with_admission;
                view.session = Some(incarnation_of(&marker).to_owned());
                if !self.rules.newest_marker_is_known {
                    view.eligibility = self.decisions(g.is_new);
                }
            }
        }
        let others = s.sites.iter_mut().enumerate().filter(|(other, _)| *other != node);
        for view in others.map(|(_, site)| &mut site.views[gateway]) {
            view.probed_since |= if view.waits.is_some() { 1 << node } else { 0 };
        }
    }

    /// What a gateway knows of the other nodes.
    fn peers(&self, s: &State, gateway: usize, node: usize) -> Vec<Peer> {
        let since = s.sites[node].views[gateway].probed_since;
        let peer = |(other, site): (usize, &Site)| {
            let (limit, bound) = site.views[gateway].seen.filter(|_| other != node)?;
            let is_recent = since & (1 << other) != 0;
            let probed = if is_recent { Duration::MAX } else { Duration::ZERO };
            Some(Peer { probed, limit, bound })
        };
        s.sites.iter().enumerate().filter_map(peer).collect()
    }

    /// Whether a gateway's client can get the lock on these nodes.
    fn can_grant(&self, s: &State, gateway: usize, nodes: u8) -> bool {
        let asked = (0..self.bounds.nodes).filter(|node| nodes & (1 << node) != 0);
        let tally = Tally { yes: asked.clone().count(), ..Tally::default() };
        let grants = |node: usize| s.sites[node].memory.locks == 0 && s.votes(gateway, node);
        self.quorum.decide(tally) == Decision::Yes && asked.clone().all(grants)
    }

    fn node_events(&self, s: &State, node: u8, actions: &mut Vec<Action>) {
        let site = &s.sites[usize::from(node)];
        if s.faults_left == 0 {
            return;
        }
        if site.memory != Stored::default() {
            actions.push(Action::Flush(node));
        }
        if self.bounds.processes {
            actions.push(Action::Restart { node, empty: true, synced: site.synced });
            if site.dump.is_none() {
                actions.push(Action::Save(node));
            }
            if site.dump.is_some() || self.bounds.durability {
                actions.push(Action::Restart { node, empty: false, synced: false });
            }
        }
        if self.bounds.evictions && site.memory.locks != 0 {
            actions.push(Action::Evict(node));
        }
        if self.bounds.durability {
            actions.push(Action::Sync { node, on: !site.synced });
            let sure = site.append_only_file == site.memory && !site.is_suspect;
            let all_know = site.views.iter().all(|view| view.session.is_some());
            if sure || all_know || !self.bounds.is_operated_well {
                actions.push(Action::Restart { node, empty: false, synced: true });
            }
        }
    }

    fn gateway_events(&self, s: &State, gateway: u8, actions: &mut Vec<Action>) {
        let at = usize::from(gateway);
        let g = s.gateways[usize::from(gateway)];
        if g.is_stopped {
            return;
        }
        for nodes in 1..1u8 << self.bounds.nodes {
            if self.can_grant(s, at, nodes) {
                actions.push(Action::Grant { gateway, nodes });
            }
        }
        let early = self.bounds.is_operated_well && g.is_new && s.change != Change::Done;
        for (node, site) in s.sites.iter().enumerate() {
            if early && site.memory.marker.is_none() {
                continue;
            }
            let node = node as u8;
            let view = &site.views[at];
            actions.push(Action::Probe { gateway, node });
            // A gateway with the shorter `max_ttl` waits only for locks with that `max_ttl`, unless
            // it has seen the larger bound.
            let is_short = self.has_shorter_ttl(g.is_new);
            let is_over = |waits: &Waits| {
                let counts = if is_short && waits.longer_by.is_zero() { s.short } else { u8::MAX };
                waits.leases & s.live & counts == 0
            };
            if view.waits.as_ref().is_some_and(is_over) {
                actions.push(Action::ProbeAtEnd { gateway, node });
            }
            if view.put.is_some() {
                actions.push(Action::Put { gateway, node });
            }
        }
        let witnesses = |h: &usize| *h == at || self.rules.bootstrap_needs_witnesses;
        let is_new =
            |node: usize| (0..GATEWAYS).filter(witnesses).all(|h| s.waits_for_new(h, node));
        let mut nodes = 0..self.bounds.nodes;
        let confirmed = if self.rules.bootstrap_needs_all_nodes {
            nodes.all(is_new)
        } else {
            nodes.any(is_new)
        };
        if g.may_confirm_new && confirmed {
            actions.push(Action::Confirm(gateway));
        }
        let another_denies = s.gateways.iter().enumerate().any(|(h, g)| h != at && g.denies_new);
        let may_start =
            !g.bootstrap || s.live == 0 || another_denies || !self.bounds.is_operated_well;
        if s.restarts_left > 0 && may_start {
            actions.push(Action::RestartGateway(gateway));
        }
    }

    pub(super) fn enabled(&self, s: &State, actions: &mut Vec<Action>) {
        actions.extend((0..8).filter(|lock| s.live & (1 << lock) != 0).map(Action::End));
        (0..self.bounds.nodes as u8).for_each(|node| self.node_events(s, node, actions));
        (0..GATEWAYS as u8).for_each(|gateway| self.gateway_events(s, gateway, actions));
        match s.change {
            Change::Before if self.bounds.change => actions.push(Action::Reconfigure),
            Change::Before if self.bounds.raise => {
                (0..self.bounds.nodes as u8)
                    .filter(|node| self.can_raise(s, *node))
                    .for_each(|node| actions.push(Action::Raise(node)));
            }
            Change::UnderWay(leases)
                if leases & s.live == 0 || !self.rules.reconfiguration_waits =>
            {
                actions.push(Action::Reconfigured);
            }
            Change::Before | Change::UnderWay(_) | Change::Done => {}
        }
    }

    pub(super) fn apply(&self, s: &State, action: Action) -> Option<State> {
        let mut next = s.clone();
        match action {
            Action::Grant { gateway, nodes } => {
                let is_new = s.gateways[usize::from(gateway)].is_new;
                next.grant(nodes, self.has_shorter_ttl(is_new));
            }
            Action::End(lock) => next.end(1 << lock),
            Action::Save(node) => {
                let site = &mut next.sites[usize::from(node)];
                site.dump = Some(site.memory.clone());
            }
            Action::Flush(node) => next.fail(node).write(|stored| *stored = Stored::default()),
            Action::Restart { node, empty, synced } => next.fail(node).restart(empty, synced),
            Action::Evict(node) => next.fail(node).evict(),
            Action::Sync { node, on } => next.fail(node).sync(on),
            Action::Probe { gateway, node } => {
                self.probe(
                    &mut next,
                    gateway.into(),
                    node.into(),
                    BEGINNING + Duration::from_millis(s.live.into()),
                );
            }
            Action::ProbeAtEnd { gateway, node } => {
                let view = &s.sites[usize::from(node)].views[usize::from(gateway)];
                let waits = view.waits.as_ref()?;
                let leases = Duration::from_millis(waits.leases.into());
                let now = BEGINNING + QUARANTINE + leases + waits.longer_by;
                self.probe(&mut next, gateway.into(), node.into(), now);
                let view = &next.sites[usize::from(node)].views[usize::from(gateway)];
                if view.put.is_none() && view.session.is_none() {
                    // The gateway has counted for an earlier marker, so this probe is an ordinary
                    // one.
                    return None;
                }
                next.has_waited = self.bounds.bootstrap;
            }
            Action::Put { gateway, node } => next.sites[usize::from(node)].put_of(gateway.into()),
            Action::Confirm(gateway) => {
                let at = usize::from(gateway);
                next.gateways[at].may_confirm_new = !self.rules.bootstrap_ends_with_admission;
                for site in &mut next.sites {
                    let waits = site.views[at].waits.as_ref().filter(|waits| waits.is_new);
                    site.views[at].confirmed_new = waits.map(|waits| waits.marker.clone());
                }
            }
            Action::RestartGateway(gateway) => {
                next.restarts_left -= 1;
                self.start(&mut next, gateway.into());
            }
            Action::Raise(node) => self.raise(&mut next, node.into()),
            Action::Reconfigure => self.reconfigure(&mut next),
            Action::Reconfigured => self.reconfigured(&mut next),
        }
        Some(next).filter(|next| next != s)
    }

    /// The command raises every bound before the first limit, and waits for a node without a
    /// marker. It repeats the last step on a node that was recovered with the earlier limit.
    fn can_raise(&self, s: &State, node: u8) -> bool {
        let site = &s.sites[usize::from(node)];
        let Some(marker) = site.memory.marker.as_deref() else { return false };
        let all_bounds = s.sites.iter().all(|site| site.raised > 0);
        match site.raised {
            0 => true,
            1 => all_bounds || !self.rules.bounds_rise_first,
            _ => {
                let limit = redlock_core::node::eligibility::ClusterConfig::max_ttl_of(marker);
                limit != Some(self.identity(true).cluster_config().max_ttl())
            }
        }
    }

    fn raise(&self, s: &mut State, node: usize) {
        let target = self.identity(true).cluster_config().max_ttl();
        let config = self.identity(false).cluster_config();
        let site = &mut s.sites[node];
        let bounds = if site.raised == 0 && self.rules.bounds_rise_first {
            TtlBounds { limit: Duration::ZERO, bound: target }
        } else {
            TtlBounds::both(target)
        };
        let raised = site.memory.marker.as_deref().and_then(|marker| config.raised(marker, bounds));
        let is_suspect = site.is_suspect;
        site.put(raised.expect("the marker is of this configuration"));
        site.is_suspect = is_suspect;
        site.raised = if bounds.limit.is_zero() { 1 } else { 2 };
    }

    fn reconfigure(&self, s: &mut State) {
        s.change = Change::UnderWay(s.live);
        for gateway in 0..GATEWAYS {
            if !s.gateways[gateway].is_new {
                self.start(s, gateway);
                s.gateways[gateway].is_stopped = true;
            }
        }
        s.sites.iter_mut().for_each(|site| site.put(self.under_way()));
    }

    fn under_way(&self) -> String {
        let left = self.identity(false);
        let target = self.identity(true);
        let left = left.cluster_config();
        let target = target.cluster_config();
        target.marker_under_way(left.node_set(), left.max_ttl(), Duration::ZERO, 0)
    }

    fn reconfigured(&self, s: &mut State) {
        s.change = Change::Done;
        let under_way = self.under_way();
        // The operator replaces only the marker that this change has written.
        for site in
            s.sites.iter_mut().filter(|site| site.memory.marker.as_deref() == Some(&*under_way))
        {
            let nonce = site.fresh_nonce().0;
            site.put(self.identity(true).admitting(&site.facts(&self.rules), nonce));
        }
        for gateway in 0..GATEWAYS {
            if s.gateways[gateway].is_stopped {
                s.gateways[gateway].is_new = true;
                self.start(s, gateway);
            }
        }
    }
}

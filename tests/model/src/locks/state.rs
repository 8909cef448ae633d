//! The state, and the effect of each event on it.

use redlock_core::node::ReleaseScope;
use redlock_core::quorum::{Decision, Tally};

use super::bounds::{CATCH_UPS, Locks, NODES, PROPOSALS, RENEWALS};
use super::reading::{CatchUp, Reading};
use crate::node::{FAR, Lock, NO_TOKEN, Node, Owner, Token, Vote, Window};
use crate::rules::Rules;

/// The whole state. Nodes are interchangeable and kept sorted. So two states that differ only in
/// the order of their nodes are one state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub(super) sites: [Site; NODES],
    pub(super) proposals: [Proposal; PROPOSALS],
    pub(super) renewals: [Renewal; RENEWALS],
    pub(super) readings: [Reading; CATCH_UPS],
    pub(super) losses_left: u8,
    /// The newest token that is too old. No gateway mints it any more, and every node's clock
    /// refuses it.
    pub(super) oldest: Token,
}

/// A node, the messages on their way to it, and its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Site {
    pub node: Node,
    pub suspicion: Option<Suspicion>,
    /// This node has been read for the node that recovers.
    pub read: bool,
    pub acquires: [Message; PROPOSALS],
    pub undos: [Release; PROPOSALS],
    pub releases: [Release; PROPOSALS],
    pub extends: [Message; RENEWALS],
    pub repairs: [Message; RENEWALS],
    /// This node's part in each of the readings for nodes that catch up.
    pub catch_ups: [CatchUp; CATCH_UPS],
}

/// A node that has lost its data, with the conditions for its next vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Suspicion {
    /// The leases that ran at the loss.
    pub leases: u8,
    /// The newest token that the node may have stored.
    pub newest: Token,
    /// The rounds that were open at the loss. Zero if the node may not recover.
    pub rounds: u8,
    /// The grants read so far, once recovery has begun.
    pub recovered: Option<Found>,
}

/// The grants read for a recovering node.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Found {
    pub lock: Option<Lock>,
    /// How many nodes store exactly this lock.
    pub copies: u8,
}

/// An operation on its way to one node. Later the node's answer, for as long as the gateway needs
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Message {
    Unsent,
    /// Sent. It may arrive now, later or never.
    Sent,
    /// Answered: granted, or extended.
    Yes,
    /// Answered: the owner's other proposal holds the lock.
    Yours,
    /// Answered: held by another grant.
    No,
    /// Answered, but the gateway does not count the answer.
    Failed,
    /// Answered: the node stores no such lock.
    Missing,
    /// The message has no further effect.
    Done,
}

/// A release on its way to one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Release {
    Unsent,
    Sent,
    /// A release of exactly this grant. It is sent because the confirmation of the grant failed.
    SentExactly,
    /// The release has reached the node, and the node has kept its data since then.
    Arrived,
}

/// One proposal: a round for the lock with one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Proposal {
    pub token: Token,
    pub nonce: u8,
    pub phase: Phase,
    /// The lease that began with the proposal has ended, and with it the belief of a holder that
    /// has not extended.
    pub ended: bool,
    /// The owner has released this or a later T, and ignores all answers to this proposal.
    pub dropped: bool,
    /// The proposal began after the owner's other proposal was granted.
    pub after_own: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    Idle,
    /// The round is open: all nodes are asked.
    Open,
    /// A majority has granted the proposal, and its owner has the answer.
    Granted,
    /// Failed, timed out or cancelled; undos are on their way to the nodes.
    GivenUp,
}

/// An extension that is under way or has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Renewal {
    /// The proposal whose grant it extends.
    pub of: Option<u8>,
    /// The owner's other request has asked for this extension, to confirm the grant.
    pub confirms: bool,
    /// A majority has extended the grant. Nodes without the lock get a repair.
    pub proved: bool,
    /// The gateway counts no more answers of this round.
    pub closed: bool,
    pub notified: bool,
    pub ended: bool,
}

/// An event. The numbers in it are indices of sites, proposals and renewals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Start {
        proposal: u8,
        phase: Phase,
    },
    Acquire {
        proposal: u8,
        site: u8,
    },
    /// A majority grants the proposal, and `renewals` extensions begin.
    Grant {
        proposal: u8,
        renewals: u8,
    },
    GiveUp(u8),
    Release(u8),
    UndoArrives {
        proposal: u8,
        site: u8,
    },
    ReleaseArrives {
        proposal: u8,
        site: u8,
    },
    Renew {
        renewal: u8,
        proposal: u8,
    },
    /// The proposal gives up, because a majority stores the grant of the owner's other proposal.
    /// That grant is extended instead.
    Confirm {
        renewal: u8,
        proposal: u8,
    },
    Extend {
        renewal: u8,
        site: u8,
    },
    Repair {
        renewal: u8,
        site: u8,
    },
    /// The lock of one node is read for another node that catches up.
    ReadForCatchUp {
        reading: u8,
        target: u8,
        site: u8,
    },
    /// The repair that a reading has sent arrives at a node.
    CatchUp {
        reading: u8,
        site: u8,
    },
    EndLease(u8),
    EndRenewalLease(u8),
    Expire(u8),
    EndWatermark(u8),
    Lose(u8),
    Readmit(u8),
    /// The lock of this node is read for the node that recovers.
    ReadForRecovery(u8),
    Recover,
}

/// The owner of a proposal. The first two proposals belong to A, which asks twice.
pub(super) fn owner(proposal: usize) -> Owner {
    if proposal < 2 { Owner::A } else { Owner::B }
}

/// The other proposal of the same owner, if there is one.
pub(super) fn sibling(proposal: usize) -> Option<usize> {
    [Some(1), Some(0), None][proposal]
}

pub(super) const fn proposal_lease(proposal: usize) -> u8 {
    1 << proposal
}

pub(super) const fn renewal_lease(renewal: usize) -> u8 {
    1 << (PROPOSALS + renewal)
}

impl Proposal {
    fn is_before(&self, suspicion: Suspicion) -> bool {
        self.phase != Phase::Idle && self.token <= suspicion.newest
    }
}

impl State {
    pub(super) fn initial(tokens: [Token; PROPOSALS], losses_left: u8, rules: &Rules) -> Self {
        let site = Site {
            node: Node::default(),
            suspicion: None,
            read: false,
            acquires: [Message::Unsent; PROPOSALS],
            undos: [Release::Unsent; PROPOSALS],
            releases: [Release::Unsent; PROPOSALS],
            extends: [Message::Unsent; RENEWALS],
            repairs: [Message::Unsent; RENEWALS],
            catch_ups: [CatchUp::None; CATCH_UPS],
        };
        let nonce = |i| u8::from(i == 1 && rules.grants_have_nonces);
        let renewal = Renewal {
            of: None,
            confirms: false,
            proved: false,
            closed: false,
            notified: false,
            ended: false,
        };
        let idle = |i: usize| Proposal {
            token: tokens[i],
            nonce: nonce(i),
            phase: Phase::Idle,
            ended: false,
            dropped: false,
            after_own: false,
        };
        Self {
            sites: [site; NODES],
            proposals: std::array::from_fn(idle),
            renewals: [renewal; RENEWALS],
            readings: [Reading::Unbegun; CATCH_UPS],
            losses_left,
            oldest: NO_TOKEN,
        }
    }

    /// Whether the owner believes that it holds the lock by this proposal.
    pub fn believes(&self, proposal: usize) -> bool {
        let t = &self.proposals[proposal];
        let renewed = |r: &Renewal| r.of == Some(proposal as u8) && r.notified && !r.ended;
        !t.dropped && (t.phase == Phase::Granted && !t.ended || self.renewals.iter().any(renewed))
    }

    /// Whether the owner has ever received the answer that it holds the lock by this proposal.
    pub fn was_notified(&self, proposal: usize) -> bool {
        let notified = |r: &Renewal| r.of == Some(proposal as u8) && r.notified;
        self.proposals[proposal].phase == Phase::Granted || self.renewals.iter().any(notified)
    }

    /// Whether a node stores the grant of this proposal.
    pub(super) fn stores(&self, site: &Site, proposal: usize) -> bool {
        site.node.lock.is_some_and(|lock| lock.is(&self.asked(proposal)))
    }

    pub(super) fn ended_leases(&self) -> u8 {
        let proposals = self
            .proposals
            .iter()
            .enumerate()
            .filter(|(_, t)| t.ended)
            .map(|(i, _)| proposal_lease(i));
        let renewals = self
            .renewals
            .iter()
            .enumerate()
            .filter(|(_, r)| r.ended)
            .map(|(i, _)| renewal_lease(i));
        proposals.chain(renewals).fold(0, |mask, bit| mask | bit)
    }

    fn running_leases(&self) -> u8 {
        let proposals = self
            .proposals
            .iter()
            .enumerate()
            .filter(|(_, t)| t.phase != Phase::Idle)
            .map(|(i, _)| proposal_lease(i));
        let renewals = self.renewals.iter().enumerate().filter(|(_, r)| r.of.is_some());
        let started = proposals
            .chain(renewals.map(|(i, _)| renewal_lease(i)))
            .fold(0, |mask, bit| mask | bit);
        started & !self.ended_leases()
    }

    /// The newest token of a right clock that any proposal has asked for.
    fn newest(&self) -> Token {
        let asked = self.proposals.iter().filter(|t| t.phase != Phase::Idle && t.token != FAR);
        asked.map(|t| t.token).max().unwrap_or(NO_TOKEN)
    }

    /// Whether a quarantine has lasted long enough. `max_ttl` after the loss, every lease that ran
    /// at the loss has ended. `max_clock_skew` later, every proposal whose token the node may have
    /// stored has ended too.
    fn is_over(&self, suspicion: Suspicion) -> bool {
        suspicion.leases & !self.ended_leases() == 0
            && self.proposals.iter().all(|t| !t.is_before(suspicion) || t.ended)
    }

    fn end_leases(&mut self, leases: u8) {
        for (i, t) in self.proposals.iter_mut().enumerate() {
            t.ended |= leases & proposal_lease(i) != 0;
        }
        for (i, r) in self.renewals.iter_mut().enumerate() {
            r.ended |= leases & renewal_lease(i) != 0;
        }
    }

    fn renew(&mut self, i: usize, proposal: u8, rules: &Rules) {
        self.renewals[i].of = Some(proposal);
        self.send(rules, |site| &mut site.extends[i]);
    }

    /// Sends a message to all nodes. A node that is not admitted gets none: the gateway has no
    /// marker to send along.
    fn send(&mut self, rules: &Rules, of: impl Fn(&mut Site) -> &mut Message) {
        for site in &mut self.sites {
            let takes_it = site.suspicion.is_none() || !rules.tells_admissions_apart();
            let message = of(site);
            if takes_it && *message == Message::Unsent {
                *message = Message::Sent;
            }
        }
    }

    /// Discards answers that no longer count.
    fn send_no_more(&mut self, renewal: usize) {
        settle(self, |site| &mut site.extends[renewal]);
    }

    fn votes(&self, of: impl Fn(&Site) -> Message) -> Tally {
        let count = |wanted: &[Message]| {
            self.sites.iter().filter(|site| wanted.contains(&of(site))).count()
        };
        Tally {
            yes: count(&[Message::Yes]),
            no: count(&[Message::No, Message::Missing]),
            failed: count(&[Message::Failed, Message::Yours]),
        }
    }

    pub(super) fn asked(&self, proposal: usize) -> Lock {
        let Proposal { token, nonce, ended, .. } = self.proposals[proposal];
        let guards = if ended { 0 } else { proposal_lease(proposal) };
        Lock { owner: owner(proposal), token, nonce, extended: false, guards }
    }

    pub(super) fn asked_again(&self, renewal: usize) -> Option<Lock> {
        let r = &self.renewals[renewal];
        let guards = if r.ended { 0 } else { renewal_lease(renewal) };
        r.of.map(|proposal| Lock { guards, ..self.asked(proposal.into()) })
    }
}

impl Locks {
    /// Starts a proposal on all nodes. It may start in the phase `GivenUp`, which stands for giving
    /// up at any later time.
    pub(super) fn start(&self, s: &mut State, i: usize, phase: Phase) {
        s.proposals[i].phase = Phase::Open;
        s.proposals[i].after_own =
            sibling(i).is_some_and(|own| s.proposals[own].phase == Phase::Granted);
        s.send(&self.rules, |site| &mut site.acquires[i]);
        if phase == Phase::GivenUp {
            self.give_up(s, i);
        }
    }

    /// Sends an undo to every node that has granted the proposal or may still grant it.
    fn give_up(&self, s: &mut State, i: usize) {
        s.proposals[i].phase = Phase::GivenUp;
        for site in &mut s.sites {
            if matches!(site.acquires[i], Message::Sent | Message::Yes) {
                site.undos[i] = Release::Sent;
            }
        }
        settle(s, |site| &mut site.acquires[i]);
    }

    pub(super) fn window(&self, s: &State) -> Window {
        let begun =
            s.renewals.iter().enumerate().filter(|(_, r)| r.of.is_some()).map(|(i, _)| 1 << i);
        let begun = begun.fold(s.readings_begun(), |mask, bit| mask | bit);
        Window { oldest: s.oldest, begun: if self.bounds.watermarks_end { begun } else { 0 } }
    }

    /// The release of a proposal arrives at a node.
    pub(super) fn end(&self, node: &mut Node, s: &State, i: usize, scope: ReleaseScope) -> Vote {
        let (window, asked) = (self.window(s), s.asked(i));
        if self.bounds.holds && scope == ReleaseScope::Holder {
            node.hold(&self.rules, window, asked)
        } else {
            node.release(&self.rules, window, asked, scope)
        }
    }

    /// The scope of a release that is on its way.
    pub(super) fn scope(&self, release: Release) -> ReleaseScope {
        match release {
            Release::SentExactly => ReleaseScope::Grant,
            _ if !self.rules.returned_watermark_stays => ReleaseScope::Proposal,
            Release::Unsent | Release::Sent | Release::Arrived => ReleaseScope::Holder,
        }
    }

    /// Whether an undo of this lock's proposal may still set back its watermark.
    fn may_undo_watermark(&self, proposals: &[Proposal; PROPOSALS], lock: Lock) -> bool {
        let may = |(i, t): (usize, &Proposal)| {
            let untold = t.phase != Phase::Granted || !self.rules.returned_watermark_stays;
            (owner(i), t.token, t.nonce) == (lock.owner, lock.token, lock.nonce) && untold
        };
        !lock.extended && proposals.iter().enumerate().any(may)
    }

    /// Every event that can happen next and changes the state. Unless `every_order` is set, an
    /// order of events that another order covers is left out too (see [`crate::locks`]).
    pub(super) fn enabled(&self, s: &State, actions: &mut Vec<Action>) {
        let decided = |i: usize| {
            let t = &s.proposals[i];
            let votes = || s.votes(|site| site.acquires[i]);
            t.phase == Phase::Open
                && !t.ended
                && !t.dropped
                && self.quorum.decide(votes()) == Decision::Yes
        };
        let begun = s.renewals.iter().filter(|r| r.of.is_some()).count();
        let free = self.bounds.renewals - begun;
        for i in (0..PROPOSALS).filter(|i| decided(*i)) {
            let later = self.bounds.every_order || self.bounds.watermarks_end;
            let maximum = if later || self.bounds.only_confirms { 0 } else { free };
            actions.extend(
                (0..=maximum)
                    .map(|renewals| Action::Grant { proposal: i as u8, renewals: renewals as u8 }),
            );
            if !self.bounds.every_order {
                return;
            }
        }
        for (i, t) in s.proposals.iter().enumerate() {
            let proposal = i as u8;
            let told = s.was_notified(i) && !t.dropped;
            if told && self.bounds.releases {
                actions.push(Action::Release(proposal));
            }
            let confirms =
                || s.sites.iter().filter(|site| site.acquires[i] == Message::Yours).count();
            if t.phase == Phase::Open && free > 0 && !t.dropped && confirms() >= self.quorum.size()
            {
                actions.push(Action::Confirm { renewal: begun as u8, proposal });
            }
            match t.phase {
                Phase::Idle if self.may_start(s, i) => {
                    let start_phases =
                        if self.bounds.every_order { &[Phase::Open] } else { self.start_phases() };
                    actions.extend(
                        start_phases.iter().map(|phase| Action::Start { proposal, phase: *phase }),
                    );
                }
                Phase::Open if self.bounds.every_order && self.bounds.releases => {
                    actions.push(Action::GiveUp(proposal))
                }
                Phase::Granted if told && !self.bounds.only_confirms => {
                    let now = self.bounds.every_order
                        || self.bounds.watermarks_end
                        || s.losses_left < self.bounds.losses;
                    if free > 0 && now {
                        actions.push(Action::Renew { renewal: begun as u8, proposal });
                    }
                }
                Phase::Idle | Phase::Open | Phase::Granted | Phase::GivenUp => {}
            }
            if self.bounds.every_order && t.phase != Phase::Idle && !t.ended {
                actions.push(Action::EndLease(proposal));
            }
        }
        for (i, r) in s.renewals.iter().enumerate() {
            if self.bounds.every_order && r.of.is_some() && !r.ended {
                actions.push(Action::EndRenewalLease(i as u8));
            }
        }
        for (at, site) in s.sites.iter().enumerate() {
            // Equal nodes have equal futures, so one of them is enough.
            if at == 0 || s.sites[at - 1] != *site {
                self.enabled_at(s, at as u8, site, actions);
            }
        }
        self.enabled_recovery(s, actions);
        self.enabled_catch_up(s, actions);
    }

    fn may_start(&self, s: &State, i: usize) -> bool {
        // A's two proposals differ only in their tokens, and all token orders are explored. So the
        // first proposal may always start first.
        let in_turn = i != 1 || s.proposals[0].phase != Phase::Idle;
        let after_own = sibling(i).is_some_and(|own| s.proposals[own].phase == Phase::Granted);
        let token = s.proposals[i].token;
        let in_quarantine = s.sites.iter().filter_map(|site| site.suspicion).any(|suspicion| {
            token > suspicion.newest
                || !self.rules.quarantine_is_waited
                || !self.rules.marker_is_checked
        });
        // A proposal that starts during a quarantine is not sent to the quarantined node. To reach
        // that node, it must be able to start after the quarantine too.
        let after_loss = self.rules.tells_admissions_apart() && s.losses_left < self.bounds.losses;
        let now = self.bounds.every_order || in_quarantine || after_loss || after_own;
        self.may_propose(i) && token > s.oldest && in_turn && now
    }

    /// Whether the proposal exists. The second one exists only if A asks a second time.
    pub(super) fn may_propose(&self, i: usize) -> bool {
        i != 1 || self.bounds.retry
    }

    fn enabled_at(&self, s: &State, at: u8, site: &Site, actions: &mut Vec<Action>) {
        for proposal in 0..PROPOSALS as u8 {
            let i = usize::from(proposal);
            if site.acquires[i] == Message::Sent {
                let mut node = site.node;
                let vote = node.acquire(&self.rules, self.window(s), s.asked(i));
                let heeded =
                    matches!(vote, Vote::Granted | Vote::Yours(_)) || self.bounds.every_order;
                let counts = s.proposals[i].phase == Phase::Open && heeded;
                if counts || node != site.node {
                    actions.push(Action::Acquire { proposal, site: at });
                }
            }
            if site.undos[i] == Release::Sent {
                actions.push(Action::UndoArrives { proposal, site: at });
            }
            if matches!(site.releases[i], Release::Sent | Release::SentExactly) {
                actions.push(Action::ReleaseArrives { proposal, site: at });
            }
        }
        for renewal in 0..self.bounds.renewals as u8 {
            let i = usize::from(renewal);
            let Some(asked) = s.asked_again(i) else { continue };
            if site.extends[i] == Message::Sent {
                let mut node = site.node;
                let vote = node.extend(&self.rules, self.window(s), asked);
                // A refusal decides a confirmation, so such a refusal must be delivered.
                let heeded =
                    vote == Vote::Extended || s.renewals[i].confirms || self.bounds.every_order;
                let counts = !s.renewals[i].proved && !s.renewals[i].closed && heeded;
                let repairs =
                    is_missing(vote) && !s.renewals[i].closed && self.rules.missing_is_repaired;
                // The longer life of the lock keeps other owners out. The owner itself needs it
                // only if it extends again.
                let again = s.renewals[..self.bounds.renewals].iter().any(|r| r.of.is_none())
                    || self.bounds.every_order
                    || self.bounds.watermarks_end
                    || self.bounds.recovery
                    || self.bounds.catch_ups > 0;
                if counts || repairs || (again && node != site.node) {
                    actions.push(Action::Extend { renewal, site: at });
                }
            }
            if site.repairs[i] == Message::Sent
                && self.repair(s, &mut { site.node }, i) == Vote::Granted
            {
                actions.push(Action::Repair { renewal, site: at });
            }
        }
        if site.node.lock.is_some_and(|lock| lock.guards == 0 || !self.bounds.every_order) {
            actions.push(Action::Expire(at));
        }
        if self.watermark_may_end(site) {
            actions.push(Action::EndWatermark(at));
        }
        let stores = site.node != Node::default() || self.bounds.every_order;
        match site.suspicion {
            None if s.losses_left > 0 && stores => actions.push(Action::Lose(at)),
            Some(suspicion)
                if !self.rules.quarantine_is_waited
                    || !self.bounds.every_order
                    || s.is_over(suspicion) =>
            {
                actions.push(Action::Readmit(at));
            }
            None | Some(_) => {}
        }
    }

    fn repair(&self, s: &State, node: &mut Node, renewal: usize) -> Vote {
        let asked = s
            .asked_again(renewal)
            .map(|asked| Lock { extended: self.rules.extension_marks, ..asked });
        asked.map_or(Vote::Missing, |asked| node.repair(&self.rules, self.window(s), asked))
    }

    /// The state after an event. The nodes keep their order.
    pub(super) fn apply(&self, s: &State, action: Action) -> State {
        let mut next = s.clone();
        match action {
            Action::Start { proposal, phase } => self.start(&mut next, proposal.into(), phase),
            Action::Acquire { proposal, site } => {
                self.acquire(&mut next, proposal.into(), site.into())
            }
            Action::Grant { proposal, renewals } => {
                let i = usize::from(proposal);
                next.proposals[i].phase = Phase::Granted;
                settle(&mut next, |site| &mut site.acquires[i]);
                let begun = s.renewals.iter().filter(|r| r.of.is_some()).count();
                (begun..begun + usize::from(renewals))
                    .for_each(|renewal| next.renew(renewal, proposal, &self.rules));
            }
            Action::GiveUp(proposal) => self.give_up(&mut next, proposal.into()),
            Action::Release(proposal) => {
                let i = usize::from(proposal);
                for (j, t) in next.proposals.iter_mut().enumerate() {
                    t.dropped |= owner(j) == owner(i)
                        && t.phase != Phase::Idle
                        && t.token <= s.proposals[i].token;
                }
                next.sites.iter_mut().for_each(|site| site.releases[i] = Release::Sent);
            }
            Action::ReleaseArrives { proposal, site } => {
                let i = usize::from(proposal);
                let site = &mut next.sites[usize::from(site)];
                let scope = self.scope(site.releases[i]);
                self.end(&mut site.node, s, i, scope);
                // `NO_ORPHAN` applies only to the release of a holder, not to the release of
                // exactly one grant. So only a holder's release is noted as arrived.
                site.releases[i] = if site.releases[i] == Release::SentExactly {
                    Release::Unsent
                } else {
                    Release::Arrived
                };
            }
            Action::UndoArrives { proposal, site } => {
                let i = usize::from(proposal);
                let site = &mut next.sites[usize::from(site)];
                site.node.release(&self.rules, self.window(s), s.asked(i), ReleaseScope::Proposal);
                site.undos[i] = Release::Arrived;
            }
            Action::Confirm { renewal, proposal } => {
                self.confirm(&mut next, renewal.into(), proposal.into())
            }
            Action::Renew { renewal, proposal } => {
                next.renew(renewal.into(), proposal, &self.rules)
            }
            Action::Extend { renewal, site } => self.extend(&mut next, renewal.into(), site.into()),
            Action::Repair { renewal, site } => {
                let i = usize::from(renewal);
                let at = usize::from(site);
                let mut node = s.sites[at].node;
                self.repair(s, &mut node, i);
                next.sites[at].node = node;
                next.sites[at].repairs[i] = Message::Yes;
            }
            Action::ReadForCatchUp { reading, target, site } => {
                self.read_for_catch_up(&mut next, reading.into(), target.into(), site.into())
            }
            Action::CatchUp { reading, site } => {
                self.catch_up(&mut next, reading.into(), site.into())
            }
            Action::EndLease(proposal) => next.proposals[usize::from(proposal)].ended = true,
            Action::EndRenewalLease(renewal) => next.renewals[usize::from(renewal)].ended = true,
            Action::Expire(site) => {
                let site = &mut next.sites[usize::from(site)];
                let guards = site.node.lock.map_or(0, |lock| lock.guards);
                site.node.expire();
                next.end_leases(guards);
            }
            Action::EndWatermark(site) => self.end_watermark(&mut next, site.into()),
            Action::Lose(site) => {
                next.abandon_recovery();
                self.lose_catch_ups(&mut next, site.into());
                let rounds = if self.bounds.recovery { s.open_rounds() } else { 0 };
                let site = &mut next.sites[usize::from(site)];
                site.node.wipe();
                site.suspicion = Some(Suspicion {
                    leases: s.running_leases(),
                    newest: s.newest(),
                    rounds,
                    recovered: None,
                });
                next.losses_left -= 1;
                let arrived = site.releases.iter_mut().chain(&mut site.undos);
                for release in arrived.filter(|release| **release == Release::Arrived) {
                    *release = Release::Unsent;
                }
                if self.rules.tells_admissions_apart() {
                    let asked =
                        site.acquires.iter_mut().chain(&mut site.extends).chain(&mut site.repairs);
                    asked
                        .filter(|message| **message == Message::Sent)
                        .for_each(|message| *message = Message::Done);
                }
            }
            Action::Readmit(site) => {
                if next.sites[usize::from(site)]
                    .suspicion
                    .is_some_and(|suspicion| suspicion.recovered.is_some())
                {
                    next.abandon_recovery();
                }
                let site = &mut next.sites[usize::from(site)];
                site.node.admitted = true;
                if let Some(suspicion) = site.suspicion.take()
                    && self.rules.quarantine_is_waited
                {
                    next.end_leases(suspicion.leases);
                    next.proposals.iter_mut().for_each(|t| t.ended |= t.is_before(suspicion));
                    next.oldest = next.oldest.max(suspicion.newest);
                }
            }
            Action::ReadForRecovery(site) => self.read(&mut next, site.into()),
            Action::Recover => self.recover(&mut next),
        }
        self.normalize(&mut next);
        next
    }

    fn acquire(&self, s: &mut State, i: usize, at: usize) {
        let window = self.window(s);
        let asked = s.asked(i);
        let phase = s.proposals[i].phase;
        let site = &mut s.sites[at];
        let vote = site.node.acquire(&self.rules, window, asked);
        site.acquires[i] = match (phase, vote) {
            (Phase::Open, Vote::Granted) => Message::Yes,
            (Phase::Open, Vote::Yours(_)) => Message::Yours,
            (Phase::Open, Vote::Held(_)) => Message::No,
            (Phase::Open, _) => Message::Failed,
            (Phase::Idle | Phase::Granted | Phase::GivenUp, _) => Message::Done,
        };
    }

    /// The second request finds that a majority stores the grant of its owner's other proposal.
    fn confirm(&self, s: &mut State, renewal: usize, i: usize) {
        let Some(other) = sibling(i) else { return };
        self.give_up(s, i);
        s.renewals[renewal].confirms = true;
        if self.rules.returned_again_is_extended {
            s.renew(renewal, other as u8, &self.rules);
        } else {
            let r = &mut s.renewals[renewal];
            (r.of, r.proved, r.notified) = (Some(other as u8), true, true);
        }
    }

    fn extend(&self, s: &mut State, i: usize, at: usize) {
        let Some(asked) = s.asked_again(i) else { return };
        let window = self.window(s);
        let vote = s.sites[at].node.extend(&self.rules, window, asked);
        s.sites[at].extends[i] = match vote {
            Vote::Extended => Message::Yes,
            vote if is_missing(vote) => Message::Missing,
            Vote::Held(_) => Message::No,
            _ => Message::Failed,
        };
        let r = s.renewals[i];
        if r.closed {
            s.send_no_more(i);
            return;
        }
        let decision = self.quorum.decide(s.votes(|site| site.extends[i]));
        if let (Decision::No, true, false, Some(of)) = (decision, r.confirms, r.proved, r.of) {
            // The confirmation failed. Some nodes may have marked the grant as extended, and the
            // undo of its own proposal would spare it there. So a release of exactly this grant
            // goes to all nodes.
            for site in
                s.sites.iter_mut().filter(|site| site.releases[usize::from(of)] == Release::Unsent)
            {
                site.releases[usize::from(of)] = Release::SentExactly;
            }
            s.send_no_more(i);
            return;
        }
        if r.proved || decision == Decision::Yes {
            let dropped = r.of.is_some_and(|of| s.proposals[usize::from(of)].dropped);
            s.renewals[i].proved = true;
            s.renewals[i].notified = r.notified || !r.ended && !dropped;
            for site in &mut s.sites {
                let timely = !r.ended || !self.rules.repair_is_timely;
                let lost =
                    site.extends[i] == Message::Missing && self.rules.missing_is_repaired && timely;
                let lost = lost && site.repairs[i] == Message::Unsent;
                if lost && (site.suspicion.is_none() || !self.rules.tells_admissions_apart()) {
                    site.repairs[i] = Message::Sent;
                }
            }
            settle(s, |site| &mut site.extends[i]);
        }
    }

    /// Brings states with equal futures to one form. A lease that has ended no longer guards a
    /// lock. A message that will be refused, or will have no effect, is dropped.
    fn normalize(&self, s: &mut State) {
        let ended = s.ended_leases();
        let proposals = s.proposals;
        let renewals = s.renewals;
        let oldest = s.oldest;
        let losses_left = s.losses_left;
        let open = s.open_rounds();
        let begun = self.window(s).begun;
        let is_fenced = self.watermarks_stay();
        self.normalize_catch_ups(s, is_fenced);
        let rules = &self.rules;
        let readings = s.readings;
        // True if no node can lose data any more, or if a node that did grants no token that it may
        // have stored before the loss.
        let barred = losses_left == 0
            || rules.clock_is_checked
                && rules.marker_is_checked
                && rules.quarantine_is_waited
                && self.bounds.renewals == 0
                && !self.bounds.recovery;
        for site in &mut s.sites {
            if let Some(lock) = &mut site.node.lock {
                lock.guards &= !ended;
            }
            if site.node.lock.is_some_and(|lock| !lock.extended) {
                // The watermark of a lock without an extension lasts longer than the lock.
                site.node.outlasts |= begun;
            }
            if !site.node.lock.is_some_and(|lock| self.may_undo_watermark(&proposals, lock)) {
                site.node.settle_watermark();
            }
            if let Some(suspicion) = &mut site.suspicion {
                suspicion.leases &= !ended;
                suspicion.rounds &= open;
                if let Some(Found { lock: Some(lock), .. }) = &mut suspicion.recovered {
                    lock.guards &= !ended;
                }
            }
            // A lock that is set by recovery may stand below any watermark.
            let recovered = self.bounds.recovery && site.suspicion.is_some();
            let barred = barred && !recovered;
            for (i, t) in proposals.iter().enumerate() {
                let stale = is_fenced && t.token <= site.node.lasting_watermark(rules);
                let is_repairable = site.node.is_repairable(t.token);
                let too_old = rules.clock_is_checked && (t.token == FAR || t.token <= oldest);
                if site.acquires[i] == Message::Sent && (too_old || stale && barred) {
                    site.acquires[i] = Message::Done;
                }
                let of = t.phase != Phase::Idle;
                let left = site
                    .node
                    .lock
                    .is_some_and(|lock| lock.owner == owner(i) && lock.token <= t.token);
                let idle = of
                    && stale
                    && !left
                    && !is_repairable
                    && !self.may_be_repaired(site, &renewals, &readings, i);
                // An arrived release may be dropped although the node can still lose its data: the
                // loss would cancel the effect of the release anyway.
                if idle && (site.releases[i] == Release::Arrived && !recovered || barred) {
                    site.releases[i] = Release::Unsent;
                }
                let stored = site.node.lock.is_some_and(|lock| {
                    (lock.owner, lock.token, lock.nonce) == (owner(i), t.token, t.nonce)
                });
                let gone = stale && !stored && !(is_repairable && self.bounds.catch_ups > 0);
                if of && gone && (site.undos[i] == Release::Arrived && !recovered || barred) {
                    site.undos[i] = Release::Unsent;
                }
            }
        }
    }
}

/// Whether a repair may help after this answer to an extension: the node has no lock, or a record
/// of nobody.
fn is_missing(vote: Vote) -> bool {
    match vote {
        Vote::Held(lock) => lock.owner == Owner::Nobody,
        vote => vote == Vote::Missing,
    }
}

/// Discards the answers that were counted for the decision.
fn settle(s: &mut State, of: impl Fn(&mut Site) -> &mut Message) {
    for message in s.sites.iter_mut().map(of) {
        if !matches!(message, Message::Unsent | Message::Sent) {
            *message = Message::Done;
        }
    }
}

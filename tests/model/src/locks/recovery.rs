//! Recovery: a node that lost its data votes again once it has recovered the locks that others
//! store.
//!
//! Reading one node is one step, and the admission is another. Any event may happen between the
//! steps. Before the first reading, three times `max_clock_skew` pass: twice for the distance of a
//! token from a node's clock, once for the distance between two gateways' clocks. Then two
//! conditions hold. No node accepts a token that the recovering node may have stored. No round that
//! was open at the loss counts another answer, though its messages may still arrive. For acquires
//! the first condition implies the second. Extensions need the second, because their T may have any
//! age.
//!
//! A grant that was read on a minority only keeps others out: the node stores a record of nobody.
//! If the node stored the grant itself, recovery could complete its majority, and the grant could
//! be extended or confirmed long after a later grant. Larger watermarks on other nodes would not
//! prevent that, because a loss of data removes watermarks too. Watermarks are not read: the tokens
//! that they kept out are too old by now.
//!
//! A reading that is abandoned and begun again changes no node. So the model explores only readings
//! that complete, and readings that a loss of data ends. If the core finds a grant on a minority,
//! it may read that lock a second time before it writes anything. The second reading covers all
//! masters and replaces the first. So it has the same effect as one reading that began later.

use super::bounds::{Locks, NODES};
use super::state::{Action, Found, Phase, State, Suspicion, proposal_lease, renewal_lease};
use crate::node::{Lock, Owner};

impl State {
    /// The rounds whose gateways still count answers.
    pub(super) fn open_rounds(&self) -> u8 {
        let proposals = self
            .proposals
            .iter()
            .enumerate()
            .filter(|(_, t)| t.phase == Phase::Open)
            .map(|(i, _)| proposal_lease(i));
        let open = self
            .renewals
            .iter()
            .enumerate()
            .filter(|(_, r)| r.of.is_some() && !r.proved && !r.closed);
        proposals.chain(open.map(|(i, _)| renewal_lease(i))).fold(0, |mask, bit| mask | bit)
    }

    /// Closes rounds: their gateways count no more answers, and send no undos. Undos are covered by
    /// another history, in which the proposal was given up before.
    fn close_rounds(&mut self, rounds: u8) {
        for (i, t) in self.proposals.iter_mut().enumerate() {
            if rounds & proposal_lease(i) != 0 && t.phase == Phase::Open {
                t.phase = Phase::GivenUp;
            }
        }
        for (i, r) in self.renewals.iter_mut().enumerate() {
            r.closed |= rounds & renewal_lease(i) != 0;
        }
    }

    /// Discards all readings.
    pub(super) fn abandon_recovery(&mut self) {
        for site in &mut self.sites {
            site.read = false;
            if let Some(suspicion) = &mut site.suspicion {
                suspicion.recovered = None;
            }
        }
    }
}

impl Locks {
    /// The node that recovers or may recover. At most one can: recovery needs enough other nodes
    /// that are admitted.
    pub(super) fn recovering_site(&self, s: &State) -> Option<usize> {
        let under_way = s
            .sites
            .iter()
            .position(|site| site.suspicion.is_some_and(|suspicion| suspicion.recovered.is_some()));
        under_way.or_else(|| s.sites.iter().position(|site| site.suspicion.is_some()))
    }

    /// How many other nodes must be read, so that each grant that may have counted the recovering
    /// node's lost vote is on one of them.
    fn readers(&self) -> usize {
        NODES - self.quorum.size() + usize::from(self.rules.recovery_needs_enough)
    }

    pub(super) fn enabled_recovery(&self, s: &State, actions: &mut Vec<Action>) {
        let admitted = s.sites.iter().filter(|site| site.suspicion.is_none()).count();
        let Some(recovering_site) = self.recovering_site(s).filter(|_| self.bounds.recovery) else {
            return;
        };
        let recovered =
            s.sites[recovering_site].suspicion.and_then(|suspicion| suspicion.recovered).is_some();
        if recovered || admitted >= self.readers() {
            let unread = s
                .sites
                .iter()
                .enumerate()
                .filter(|(_, site)| site.suspicion.is_none() && !site.read);
            actions.extend(unread.map(|(at, _)| Action::ReadForRecovery(at as u8)));
        }
        if recovered && s.sites.iter().filter(|site| site.read).count() >= self.readers() {
            actions.push(Action::Recover);
        }
    }

    pub(super) fn read(&self, s: &mut State, at: usize) {
        let Some(recovering_site) = self.recovering_site(s) else { return };
        let Some(mut suspicion) = s.sites[recovering_site].suspicion else { return };
        let found = suspicion.recovered.unwrap_or_else(|| self.begin_recovery(s, suspicion));
        s.sites[at].read = true;
        // A grant with a newer token cannot have counted the lost vote. A record of nobody may
        // stand for an older grant too, whatever its own token.
        let seen = s.sites[at]
            .node
            .lock
            .filter(|lock| lock.owner == Owner::Nobody || lock.token <= suspicion.newest);
        suspicion.recovered = Some(self.either(found, seen));
        suspicion.rounds = 0;
        s.sites[recovering_site].suspicion = Some(suspicion);
    }

    fn begin_recovery(&self, s: &mut State, suspicion: Suspicion) -> Found {
        if self.rules.recovery_waits_for_clocks {
            s.oldest = s.oldest.max(suspicion.newest);
        }
        if self.rules.recovery_waits_for_rounds {
            s.close_rounds(suspicion.rounds);
        }
        Found::default()
    }

    /// Combines the grants read so far with the grant of the next node.
    fn either(&self, found: Found, seen: Option<Lock>) -> Found {
        let seen = seen.filter(|lock| {
            lock.owner != Owner::Nobody || self.rules.recovery_remembers_kept_free_records
        });
        let Some(seen) = seen else { return found };
        let Some(lock) = found.lock else { return Found { lock: Some(seen), copies: 1 } };
        let guards = if self.rules.recovery_blocks_longest {
            lock.guards | seen.guards
        } else {
            lock.guards
        };
        if lock.is(&seen) {
            let extended = lock.extended || seen.extended;
            Found { lock: Some(Lock { extended, guards, ..lock }), copies: found.copies + 1 }
        } else {
            // Both grants may have counted the lost vote, so nobody gets the lock until both have
            // ended.
            Found { lock: Some(Lock::blocker(lock.token.max(seen.token), guards)), copies: 1 }
        }
    }

    /// Admits the node with the lock that was found.
    pub(super) fn recover(&self, s: &mut State) {
        let Some(at) = self.recovering_site(s) else { return };
        let Some(found) = s.sites[at].suspicion.take().and_then(|suspicion| suspicion.recovered)
        else {
            return;
        };
        let stands =
            usize::from(found.copies) >= self.quorum.size() || !self.rules.recovery_needs_majority;
        let lock = found.lock.filter(|_| self.rules.lost_locks_are_recovered);
        let window = self.window(s);
        s.sites[at].node.recover(&self.rules, window, lock, stands);
        s.abandon_recovery();
    }
}

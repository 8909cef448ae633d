//! Recovery: a node that lost its data votes again once it has recovered the locks that others
//! store.
//!
//! Each reading is a step, and so is the admission; any event may happen in between. Three times
//! `max_clock_skew` pass before the first reading: twice for the distance of tokens from nodes'
//! clocks, once between gateways. By then no node accepts a token that the lost node may have
//! stored. No round counts an answer either that was open at the loss, though its messages may
//! still arrive. (For acquires the first condition implies the second. The second is for
//! extensions, whose T may have any age.)
//!
//! A grant that was read keeps others out and does no more. A grant on a minority could otherwise
//! get a majority by recovery, and be extended or confirmed long after a later grant. Larger
//! watermarks on other nodes would not prevent this, because watermarks are lost too. So watermarks
//! are not read: the tokens that they kept out are too old by now.
//!
//! A reading that is abandoned and begun again leaves nothing on any node. So the model explores
//! only readings that complete or that a loss of data ends. The core may read a name on a minority
//! a second time before it writes anything. The second reading of all masters replaces the first,
//! as a reading that began later would.

use super::bounds::{Locks, NODES};
use super::state::{Action, Found, Phase, State, Suspicion, proposal_lease, renewal_lease};
use crate::node::{Lock, Owner};

impl State {
    /// Rounds whose gateway still counts answers.
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

    /// Closes rounds: their gateways count no more answers. A history in which they send undos is
    /// another one, of a proposal given up before.
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
    /// The node that recovers or may recover. With enough others admitted there is only one.
    pub(super) fn recovering_site(&self, s: &State) -> Option<usize> {
        let under_way = s
            .sites
            .iter()
            .position(|site| site.suspicion.is_some_and(|suspicion| suspicion.recovered.is_some()));
        under_way.or_else(|| s.sites.iter().position(|site| site.suspicion.is_some()))
    }

    /// How many others must be read, so that one of them has each grant the lost node has voted
    /// for.
    fn readers(&self) -> usize {
        NODES - self.quorum.size() + usize::from(self.rules.adoption_needs_enough)
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
        // A newer grant has not counted the lost vote. A record of nobody stands for all grants it
        // was made from.
        let seen = s.sites[at]
            .node
            .lock
            .filter(|lock| lock.owner == Owner::Nobody || lock.token <= suspicion.newest);
        suspicion.recovered = Some(self.either(found, seen));
        suspicion.rounds = 0;
        s.sites[recovering_site].suspicion = Some(suspicion);
    }

    fn begin_recovery(&self, s: &mut State, suspicion: Suspicion) -> Found {
        if self.rules.adoption_waits_for_clocks {
            s.oldest = s.oldest.max(suspicion.newest);
        }
        if self.rules.adoption_waits_for_rounds {
            s.close_rounds(suspicion.rounds);
        }
        Found::default()
    }

    /// Combines the grants read so far with the next one.
    fn either(&self, found: Found, seen: Option<Lock>) -> Found {
        let seen = seen
            .filter(|lock| lock.owner != Owner::Nobody || self.rules.adoption_remembers_blockers);
        let Some(seen) = seen else { return found };
        let Some(lock) = found.lock else { return Found { lock: Some(seen), copies: 1 } };
        let guards = if self.rules.adoption_blocks_longest {
            lock.guards | seen.guards
        } else {
            lock.guards
        };
        if lock.is(&seen) {
            let extended = lock.extended || seen.extended;
            Found { lock: Some(Lock { extended, guards, ..lock }), copies: found.copies + 1 }
        } else {
            // Either grant may have had the lost vote.
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
            usize::from(found.copies) >= self.quorum.size() || !self.rules.adoption_needs_majority;
        let lock = found.lock.filter(|_| self.rules.lost_locks_are_recovered);
        let window = self.window(s);
        s.sites[at].node.recover(&self.rules, window, lock, stands);
        s.abandon_recovery();
    }
}

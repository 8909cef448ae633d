//! Back in seconds: a node that lost its data votes again when it has recovered what the others store.
//!
//! Each reading is a step, and the eligibility is another: whatever may happen happens in between. Before the first reading
//! 2D + S pass, so that no node takes a token any more that the lost one may have stored, and no round counts an answer
//! that was open at the loss; its messages may arrive all the same. (Of acquires the first says as much already. The second
//! is for extensions, whose T may be of any age.)
//!
//! What was read keeps others out, and no more: a grant that only a minority stores could otherwise get a majority by
//! recovery, and be extended or confirmed when a later one was held long ago. That others have a larger fence would not
//! tell so, as fences are lost too. So fences are not read: the tokens that they kept out are too old by now.
//!
//! A reading that is given up and begun again leaves nothing on any node, so only those are explored that end, or that a
//! loss of data ends. So a name that only a minority has may be read a second time before anything is written: the second
//! reading of all masters replaces the first, as one that began later would have.

use super::bounds::{Locks, NODES};
use super::state::{Action, Found, Phase, State, Suspicion, renewal_lease, try_lease};
use crate::node::{Lock, Owner};

impl State {
    /// Rounds whose gateway still counts answers.
    pub(super) fn open_rounds(&self) -> u8 {
        let tries = self
            .tries
            .iter()
            .enumerate()
            .filter(|(_, t)| t.phase == Phase::Open)
            .map(|(i, _)| try_lease(i));
        let open = self
            .renewals
            .iter()
            .enumerate()
            .filter(|(_, r)| r.of.is_some() && !r.proved && !r.closed);
        tries.chain(open.map(|(i, _)| renewal_lease(i))).fold(0, |mask, bit| mask | bit)
    }

    /// Their gateways count no answer any more. That they send undos is another history: of a try given up before.
    fn close_rounds(&mut self, rounds: u8) {
        for (i, t) in self.tries.iter_mut().enumerate() {
            if rounds & try_lease(i) != 0 && t.phase == Phase::Open {
                t.phase = Phase::GivenUp;
            }
        }
        for (i, r) in self.renewals.iter_mut().enumerate() {
            r.closed |= rounds & renewal_lease(i) != 0;
        }
    }

    /// What was read is of no use any more.
    pub(super) fn abandon_adoption(&mut self) {
        for site in &mut self.sites {
            site.read = false;
            if let Some(suspicion) = &mut site.suspicion {
                suspicion.adopts = None;
            }
        }
    }
}

impl Locks {
    /// The node that adopts, or may: with enough others there is but one.
    pub(super) fn adopter(&self, s: &State) -> Option<usize> {
        let under_way = s
            .sites
            .iter()
            .position(|site| site.suspicion.is_some_and(|suspicion| suspicion.adopts.is_some()));
        under_way.or_else(|| s.sites.iter().position(|site| site.suspicion.is_some()))
    }

    /// How many others must be read: one of them has what the lost node has voted for.
    fn readers(&self) -> usize {
        NODES - self.quorum.size() + usize::from(self.rules.adoption_needs_enough)
    }

    pub(super) fn enabled_adoption(&self, s: &State, actions: &mut Vec<Action>) {
        let admitted = s.sites.iter().filter(|site| site.suspicion.is_none()).count();
        let Some(adopter) = self.adopter(s).filter(|_| self.bounds.recovery) else { return };
        let adopts = s.sites[adopter].suspicion.and_then(|suspicion| suspicion.adopts).is_some();
        if adopts || admitted >= self.readers() {
            let unread = s
                .sites
                .iter()
                .enumerate()
                .filter(|(_, site)| site.suspicion.is_none() && !site.read);
            actions.extend(unread.map(|(at, _)| Action::Read(at as u8)));
        }
        if adopts && s.sites.iter().filter(|site| site.read).count() >= self.readers() {
            actions.push(Action::Adopt);
        }
    }

    pub(super) fn read(&self, s: &mut State, at: usize) {
        let Some(adopter) = self.adopter(s) else { return };
        let Some(mut suspicion) = s.sites[adopter].suspicion else { return };
        let found = suspicion.adopts.unwrap_or_else(|| self.begin_adoption(s, suspicion));
        s.sites[at].read = true;
        // A newer grant has not counted the lost vote. A record of nobody stands for all that it was read of.
        let seen = s.sites[at]
            .node
            .lock
            .filter(|lock| lock.owner == Owner::Nobody || lock.token <= suspicion.newest);
        suspicion.adopts = Some(self.either(found, seen));
        suspicion.rounds = 0;
        s.sites[adopter].suspicion = Some(suspicion);
    }

    fn begin_adoption(&self, s: &mut State, suspicion: Suspicion) -> Found {
        if self.rules.adoption_waits_for_clocks {
            s.oldest = s.oldest.max(suspicion.newest);
        }
        if self.rules.adoption_waits_for_rounds {
            s.close_rounds(suspicion.rounds);
        }
        Found::default()
    }

    /// What may have been the lost node's, of all that was read.
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
            // Which of the two the lost vote was for is not known.
            Found { lock: Some(Lock::blocker(lock.token.max(seen.token), guards)), copies: 1 }
        }
    }

    /// The node is admitted with what was found.
    pub(super) fn recover(&self, s: &mut State) {
        let Some(at) = self.adopter(s) else { return };
        let Some(found) = s.sites[at].suspicion.take().and_then(|suspicion| suspicion.adopts)
        else {
            return;
        };
        let stands =
            usize::from(found.copies) >= self.quorum.size() || !self.rules.adoption_needs_majority;
        let lock = found.lock.filter(|_| self.rules.lost_locks_are_recovered);
        let window = self.window(s);
        s.sites[at].node.recover(&self.rules, window, lock, stands);
        s.abandon_adoption();
    }
}

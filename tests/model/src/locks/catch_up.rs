//! Catching up: an admitted node gets the locks that a majority of the others stores.
//!
//! Reading one node is one step. So a reading may combine states of nodes that never existed at the
//! same time. When a majority of the others has returned the same grant, a repair with that grant
//! is sent to the node. It arrives at any later time, or never. The
//! repair sets the lock with the longest life of all copies that were read. It marks the lock as
//! extended if one of these copies is.
//!
//! Any node may catch up at any time, because any node may have restarted with all its data. A node
//! that was already read may lose its data before the other one is read. If the node that catches
//! up loses its data, its reading and its repair end, because both belong to the admission before
//! the loss.
//!
//! A reading begins with the first node that returns the grant. A real reading may have begun
//! earlier, but then the clock refuses its repair at the same time or sooner. A reading that finds
//! nothing changes nothing.
//!
//! The undo of a failed proposal promises less to a node that catches up (see `has_no_orphan`). An
//! undo sets the watermark back. So a node that gets the grant after the undo cannot know that the
//! undo has passed. A minority of nodes then stores the grant until its time to live ends.

use super::bounds::{Locks, NODES, PROPOSALS, RENEWALS};
use super::reading::{CatchUp, Reading};
use super::state::{Action, Site, State};
use crate::node::{Lock, Owner, Vote};

/// The bit of a reading in [`Window::begun`](crate::node::Window), above the bits of the
/// extensions.
pub(super) const fn reading_bit(reading: usize) -> u8 {
    1 << (RENEWALS + reading)
}

impl Site {
    /// Whether the node stores this grant as the result of catching up.
    pub(super) fn caught_up_with(&self, grant: &Lock) -> bool {
        self.catch_ups.iter().any(|part| matches!(part, CatchUp::Given(given) if given.is(grant)))
    }
}

impl State {
    pub(super) fn readings_begun(&self) -> u8 {
        let begun =
            self.readings.iter().enumerate().filter(|(_, reading)| **reading != Reading::Unbegun);
        begun.fold(0, |mask, (i, _)| mask | reading_bit(i))
    }

    /// From now on the clock of this node refuses the grant that a reading has found. The reading
    /// for this node, or the repair on its way to it, ends.
    pub(super) fn refuse_catch_up(&mut self, reading: usize, at: usize) {
        match self.sites[at].catch_ups[reading] {
            CatchUp::Target => self.end_reading(reading),
            CatchUp::Sent(_) => self.sites[at].catch_ups[reading] = CatchUp::None,
            CatchUp::None | CatchUp::Seen | CatchUp::Given(_) => {}
        }
    }

    fn end_reading(&mut self, reading: usize) {
        self.readings[reading] = Reading::Over;
        for site in &mut self.sites {
            if matches!(site.catch_ups[reading], CatchUp::Target | CatchUp::Seen) {
                site.catch_ups[reading] = CatchUp::None;
            }
        }
    }
}

impl Locks {
    pub(super) fn enabled_catch_up(&self, s: &State, actions: &mut Vec<Action>) {
        for i in 0..self.bounds.catch_ups {
            let reading = i as u8;
            match s.readings[i] {
                // The readings begin in the order of their numbers.
                Reading::Unbegun if i > 0 && s.readings[i - 1] == Reading::Unbegun => {}
                Reading::Unbegun => {
                    for (site, of) in s.sites.iter().enumerate() {
                        let Some(lock) = of.node.lock.filter(|lock| self.may_be_read(s, of, *lock))
                        else {
                            continue;
                        };
                        let missing =
                            |at: &usize| *at != site && self.may_catch_up(&s.sites[*at], lock);
                        let targets = (0..NODES).filter(missing);
                        actions.extend(targets.map(|at| Action::ReadForCatchUp {
                            reading,
                            target: at as u8,
                            site: site as u8,
                        }));
                    }
                }
                Reading::Of(lock) => {
                    let Some(target) =
                        s.sites.iter().position(|site| site.catch_ups[i] == CatchUp::Target)
                    else {
                        continue;
                    };
                    let shows = |site: &Site| {
                        let same = site.node.lock.is_some_and(|other| other.is(&lock));
                        same && site.suspicion.is_none() && site.catch_ups[i] == CatchUp::None
                    };
                    let shown = s.sites.iter().enumerate().filter(|(_, site)| shows(site));
                    let target = target as u8;
                    actions.extend(shown.map(|(at, _)| Action::ReadForCatchUp {
                        reading,
                        target,
                        site: at as u8,
                    }));
                }
                Reading::Over => {}
            }
            for (at, site) in s.sites.iter().enumerate() {
                let CatchUp::Sent(lock) = site.catch_ups[i] else { continue };
                if { site.node }.repair(&self.rules, self.window(s), lock) == Vote::Granted {
                    actions.push(Action::CatchUp { reading, site: at as u8 });
                }
            }
        }
    }

    /// In models whose watermarks end, no reading begins after the owner's release (see
    /// `fences.rs`).
    fn may_be_read(&self, s: &State, site: &Site, lock: Lock) -> bool {
        let released = |i: usize| lock.is(&s.asked(i)) && s.proposals[i].dropped;
        let too_late = self.bounds.watermarks_end && (0..PROPOSALS).any(released);
        site.suspicion.is_none() && lock.owner != Owner::Nobody && !too_late
    }

    fn may_catch_up(&self, site: &Site, lock: Lock) -> bool {
        let stores = site.node.lock.is_some_and(|other| other.is(&lock));
        let admitted = site.suspicion.is_none() || !self.rules.catch_up_follows_admission;
        admitted && !stores && !self.keeps_out(site, lock, self.watermarks_stay())
    }

    pub(super) fn read_for_catch_up(
        &self,
        s: &mut State,
        reading: usize,
        target: usize,
        at: usize,
    ) {
        let Some(seen) = s.sites[at].node.lock else { return };
        let found = match s.readings[reading] {
            Reading::Of(found) => Lock {
                extended: found.extended || seen.extended,
                guards: found.guards | seen.guards,
                ..found
            },
            Reading::Unbegun | Reading::Over => seen,
        };
        s.readings[reading] = Reading::Of(found);
        s.sites[target].catch_ups[reading] = CatchUp::Target;
        s.sites[at].catch_ups[reading] = CatchUp::Seen;
        let copies = s.sites.iter().filter(|site| site.catch_ups[reading] == CatchUp::Seen).count();
        if copies >= self.quorum.size() || !self.rules.catch_up_needs_majority {
            s.end_reading(reading);
            s.sites[target].catch_ups[reading] = CatchUp::Sent(found);
        }
    }

    pub(super) fn catch_up(&self, s: &mut State, reading: usize, at: usize) {
        let CatchUp::Sent(lock) = s.sites[at].catch_ups[reading] else { return };
        let window = self.window(s);
        s.sites[at].node.repair(&self.rules, window, lock);
        s.sites[at].catch_ups[reading] =
            CatchUp::Given(Lock { guards: 0, extended: false, ..lock });
    }

    /// What a node's loss of data does to readings: a reading for this node ends, and a repair on
    /// its way to it is refused.
    pub(super) fn lose_catch_ups(&self, s: &mut State, at: usize) {
        for i in 0..self.bounds.catch_ups {
            match s.sites[at].catch_ups[i] {
                CatchUp::Target if self.rules.catch_up_follows_admission => s.end_reading(i),
                CatchUp::Sent(_)
                    if self.rules.tells_admissions_apart()
                        && self.rules.catch_up_follows_admission =>
                {
                    s.sites[at].catch_ups[i] = CatchUp::None;
                }
                _ => {}
            }
        }
    }

    /// Brings states with equal futures to one form. A lease that has ended no longer guards a
    /// lock. A repair that the watermark will always refuse is dropped. `is_fenced` says that only
    /// a loss of data removes watermarks.
    pub(super) fn normalize_catch_ups(&self, s: &mut State, is_fenced: bool) {
        let ended = s.ended_leases();
        for i in 0..self.bounds.catch_ups {
            if let Reading::Of(lock) = &mut s.readings[i] {
                lock.guards &= !ended;
                let grant = *lock;
                let target = s.sites.iter().find(|site| site.catch_ups[i] == CatchUp::Target);
                if target.is_some_and(|site| self.keeps_out(site, grant, is_fenced)) {
                    s.end_reading(i);
                }
            }
            for site in &mut s.sites {
                match site.catch_ups[i] {
                    CatchUp::Sent(lock) if self.keeps_out(site, lock, is_fenced) => {
                        site.catch_ups[i] = CatchUp::None
                    }
                    CatchUp::Sent(lock) => {
                        site.catch_ups[i] =
                            CatchUp::Sent(Lock { guards: lock.guards & !ended, ..lock });
                    }
                    CatchUp::Given(grant)
                        if !site.node.lock.is_some_and(|lock| lock.is(&grant)) =>
                    {
                        site.catch_ups[i] = CatchUp::None;
                    }
                    CatchUp::None | CatchUp::Target | CatchUp::Seen | CatchUp::Given(_) => {}
                }
            }
        }
    }

    /// Whether this node refuses every repair of the grant as long as it keeps its data.
    fn keeps_out(&self, site: &Site, grant: Lock, is_fenced: bool) -> bool {
        let ends = self.rules.tells_admissions_apart() && self.rules.catch_up_follows_admission;
        let stale = site.node.lasting_watermark(&self.rules) >= grant.token
            && !site.node.is_repairable(grant.token);
        is_fenced && ends && stale && !self.bounds.watermarks_end
    }
}

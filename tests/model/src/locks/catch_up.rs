//! Catching up: an admitted node gets the locks that a majority of the others stores.
//!
//! Each node is read in a step of its own. So a reading may combine states that the nodes never had
//! at one time. When enough others have returned the same grant, a repair of it is on its way to
//! the node. It arrives at any later time, or never. It has the longest life of the copies, and the
//! mark of an extension if one copy has it.
//!
//! Any node may catch up at any time, because any node may have restarted with all its data. A node
//! that was read may lose its data before the others are read. If the node that catches up loses
//! its data, the reading and the repair end: both belong to one admission.
//!
//! A reading begins with the first node that returns the grant. The clock refuses a repair from an
//! earlier reading no later. A reading that finds nothing changes nothing.
//!
//! The undo of a failed proposal promises less here than elsewhere, see `has_no_orphan`. An undo
//! sets its watermark back, so a node that gets the grant afterwards cannot detect the undo. The
//! grant then ends with its time to live, on a minority.

use super::bounds::{Locks, NODES, PROPOSALS, RENEWALS};
use super::reading::{CatchUp, Reading};
use super::state::{Action, Site, State};
use crate::node::{Lock, Owner, Vote};

/// The bit of a reading, beside the bits of extensions in [`Window::begun`](crate::node::Window).
pub(super) const fn reading_bit(reading: usize) -> u8 {
    1 << (RENEWALS + reading)
}

impl Site {
    /// Whether the node stores this grant because it has caught up.
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

    /// The clock of this node refuses the grant that a reading has found.
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
                // Readings begin in order.
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

    /// Where watermarks end, a reading does not begin after the owner's release, see `fences.rs`.
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

    /// Effects of a node's loss of data.
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

    /// Brings states with equal futures to one form: leases that ended guard nothing, and a repair
    /// that the watermark will always refuse is dropped. `is_fenced`: only a loss of data takes
    /// watermarks away.
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

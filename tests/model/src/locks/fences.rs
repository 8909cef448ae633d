//! Watermarks that end, where [`Bounds::watermarks_end`](super::Bounds) is set.
//!
//! A watermark lives as long as its lock's time to live when it was set, plus the core's
//! `fence_grace`: twice `max_clock_skew` and the longest round. The operations that it kept out
//! carry a time that the node compares with its own: an acquire its T, a repair the beginning of
//! its extension. When the watermark ends, the node refuses every T up to the watermark. It also
//! refuses a repair whose extension had begun when the watermark was set, or while its lock stood
//! unextended. Extensions that began later count as young enough, which allows more than the
//! longest round does. A lock that is extended again and again outlives its watermark.
//!
//! No extension, and no reading for a node that catches up, begins here after its own owner's
//! release. Another party's release, or one that reaches other nodes long after this one, is
//! different. Then an extension may begin later than the watermark lasts, and sets the lock again.

use super::bounds::{CATCH_UPS, Locks, PROPOSALS, RENEWALS};
use super::catch_up::reading_bit;
use super::reading::{CatchUp, Reading};
use super::state::{Message, Renewal, Site, State};
use crate::node::{NO_TOKEN, Token};

impl Locks {
    /// Whether only a loss of data takes a watermark away.
    pub(super) fn watermarks_stay(&self) -> bool {
        let rules = &self.rules;
        rules.watermark_is_checked
            && rules.lock_is_kept
            && rules.release_leaves_a_tombstone
            && rules.release_keeps_newer
            && rules.watermarks_last()
            && (rules.fence_outlives_lock || !self.bounds.watermarks_end)
    }

    pub(super) fn watermark_may_end(&self, site: &Site) -> bool {
        let stands = site.node.lock.is_some_and(|lock| !lock.extended);
        // Otherwise the watermark can no longer affect any message.
        let readings = (0..self.bounds.catch_ups).fold(0, |mask, i| mask | reading_bit(i));
        let all = readings | ((1 << self.bounds.renewals) - 1);
        let matters = site.node.outlasts != all
            || !self.rules.fence_outlives_lock
            || !self.rules.late_repair_is_refused;
        self.bounds.watermarks_end && site.node.watermark != NO_TOKEN && !stands && matters
    }

    pub(super) fn end_watermark(&self, s: &mut State, at: usize) {
        let site = &mut s.sites[at];
        let (watermark, outlasts): (Token, u8) = (site.node.watermark, site.node.outlasts);
        site.node.end_watermark();
        if !self.rules.fence_outlives_lock {
            return;
        }
        let old_acquires = (0..PROPOSALS)
            .filter(|i| s.proposals[*i].token <= watermark)
            .fold(0, |mask, i| mask | 1 << i);
        refuse(&mut site.acquires, old_acquires);
        if self.rules.late_repair_is_refused {
            refuse(&mut site.repairs, outlasts);
            (0..CATCH_UPS)
                .filter(|i| outlasts & reading_bit(*i) != 0)
                .for_each(|i| s.refuse_catch_up(i, at));
        }
    }

    /// Whether a repair of this proposal may still be accepted when the watermark has ended.
    pub(super) fn may_be_repaired(
        &self,
        site: &Site,
        renewals: &[Renewal; RENEWALS],
        readings: &[Reading; CATCH_UPS],
        proposal: usize,
    ) -> bool {
        let open = |i: usize| matches!(site.repairs[i], Message::Unsent | Message::Sent);
        let of = |i: &usize| renewals[*i].of == Some(proposal as u8);
        let read = |i: usize| {
            let under_way = !matches!(readings[i], Reading::Over) && i < self.bounds.catch_ups;
            under_way || matches!(site.catch_ups[i], CatchUp::Sent(_))
        };
        self.bounds.watermarks_end
            && ((0..RENEWALS).filter(of).any(open) || (0..CATCH_UPS).any(read))
    }
}

/// Refuses these messages, including unsent ones, which carry the same time.
fn refuse(messages: &mut [Message], which: u8) {
    for (i, message) in messages.iter_mut().enumerate() {
        if which & (1 << i) != 0 && matches!(message, Message::Unsent | Message::Sent) {
            *message = Message::Done;
        }
    }
}

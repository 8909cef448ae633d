//! Watermarks that end, where [`Bounds::watermarks_end`](super::Bounds) is set.
//!
//! The core keeps a watermark for its lock's time to live, counted from when the watermark was set,
//! plus `fence_grace`: twice `max_clock_skew` and the longest round. Every operation that a
//! watermark keeps out carries a time that the node compares with its own: an acquire carries its
//! T, a repair the beginning of its extension. When the watermark ends, the node refuses every
//! acquire with a T up to the watermark. It also refuses a repair if its extension had begun when
//! the watermark was set, or while the lock stood unextended. The model takes every later extension
//! for young enough, which allows more histories than the core's longest round. A lock that is
//! extended again and again outlives its watermark.
//!
//! In the model no extension, and no reading for a node that catches up, begins after the owner's
//! own release. Another party may release the lock, or a release may reach the other nodes much
//! later than this one. Then an extension can begin after the watermark has ended, and set the lock
//! again. The product does not prevent this.

use super::bounds::{CATCH_UPS, Locks, PROPOSALS, RENEWALS};
use super::catch_up::reading_bit;
use super::reading::{CatchUp, Reading};
use super::state::{Message, Renewal, Site, State};
use crate::node::{NO_TOKEN, Token};

impl Locks {
    /// Whether only a loss of data removes a watermark.
    pub(super) fn watermarks_stay(&self) -> bool {
        let rules = &self.rules;
        rules.watermark_is_checked
            && rules.lock_is_kept
            && rules.release_leaves_a_tombstone
            && rules.release_keeps_newer
            && rules.watermarks_last()
            && (rules.watermark_outlives_lock || !self.bounds.watermarks_end)
    }

    pub(super) fn watermark_may_end(&self, site: &Site) -> bool {
        let stands = site.node.lock.is_some_and(|lock| !lock.extended);
        // If the clock refuses every extension and reading, the watermark can no longer affect any
        // message.
        let readings = (0..self.bounds.catch_ups).fold(0, |mask, i| mask | reading_bit(i));
        let all = readings | ((1 << self.bounds.renewals) - 1);
        let matters = site.node.outlasts != all
            || !self.rules.watermark_outlives_lock
            || !self.rules.late_repair_is_refused;
        self.bounds.watermarks_end && site.node.watermark != NO_TOKEN && !stands && matters
    }

    pub(super) fn end_watermark(&self, s: &mut State, at: usize) {
        let site = &mut s.sites[at];
        let (watermark, outlasts): (Token, u8) = (site.node.watermark, site.node.outlasts);
        site.node.end_watermark();
        if !self.rules.watermark_outlives_lock {
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

    /// Whether a repair of this proposal's grant may still be accepted once the watermark has
    /// ended.
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

/// Refuses these messages. An unsent message is refused too, because it would carry the same time.
fn refuse(messages: &mut [Message], which: u8) {
    for (i, message) in messages.iter_mut().enumerate() {
        if which & (1 << i) != 0 && matches!(message, Message::Unsent | Message::Sent) {
            *message = Message::Done;
        }
    }
}

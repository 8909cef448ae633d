//! The rules that safety rests on, each with a switch. With a rule off its model must find a counter-example, or the
//! model would prove nothing about it.

/// Which rules are on. Fields that `redlock_core::node::Rules` has as well mean the same there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A retry by the same owner takes a new T, rewrites both keys, and counts only grants with exactly that T.
    pub retry_rewrites: bool,
    /// A release leaves the fence at T or above.
    pub release_is_a_barrier: bool,
    /// A release deletes only a lock whose T is not newer than its own.
    pub release_keeps_newer: bool,
    /// A node refuses a T too far from its own time.
    pub clock_is_checked: bool,
    /// A node grants only a T larger than the last it has stored for the lock.
    pub fence_is_checked: bool,
    /// A node refuses lock operations unless the marker of its admission stands.
    pub marker_is_checked: bool,
    /// A node that lost its data is admitted only when every lock that it may have forgotten has ended, and every
    /// gateway mints larger tokens than those it may have forgotten.
    pub quarantine_is_waited: bool,
    /// A quarantine ends only when the very marker stands whose age was counted.
    pub quarantine_has_nonce: bool,
    /// A quarantine counts only for the process that it began in.
    pub admission_names_process: bool,
    /// Every admission has a marker of its own: what was sent before a loss of data is refused after it.
    pub marker_names_admission: bool,
    /// A successful extension sets the lock again on nodes that lost it.
    pub missing_is_healed: bool,
    /// A heal is not held to the age of its T, which is the age of the lock.
    pub heal_may_be_old: bool,
    /// An extension marks the lock and its fence, so that a heal can tell a lock that expired from one that was released.
    pub extension_marks: bool,
    /// A release takes the mark away.
    pub release_unmarks: bool,
    /// No heal is sent after the lease has ended that its extension gave.
    pub heal_is_timely: bool,
    /// Two tries of one owner never ask with the same T, whichever gateways make them.
    pub retry_mints_new: bool,
    /// A failed try of an owner that may have been granted the lock before undoes only what it set where that owner had
    /// nothing.
    pub undo_spares_older: bool,
}

impl Rules {
    /// All of them.
    pub const ALL: Self = Self {
        retry_rewrites: true,
        release_is_a_barrier: true,
        release_keeps_newer: true,
        clock_is_checked: true,
        fence_is_checked: true,
        marker_is_checked: true,
        quarantine_is_waited: true,
        quarantine_has_nonce: true,
        admission_names_process: true,
        marker_names_admission: true,
        missing_is_healed: true,
        heal_may_be_old: true,
        extension_marks: true,
        release_unmarks: true,
        heal_is_timely: true,
        retry_mints_new: true,
        undo_spares_older: true,
    };

    /// Whether a node refuses what was sent before it lost its data.
    pub fn tells_admissions_apart(&self) -> bool {
        self.marker_is_checked && self.marker_names_admission
    }
}

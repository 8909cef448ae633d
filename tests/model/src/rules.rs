//! The rules that safety rests on, each with a switch. With a rule off, a model must find a
//! counter-example; otherwise it would prove nothing about the rule.

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident)*) => {
        /// Which rules are on. A field that `redlock_core::node::SafetyRules` has too means the
        /// same there.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct Rules {
            $($(#[$doc])* pub $rule: bool,)*
        }

        impl Rules {
            /// All rules on, as they ship.
            pub const ALL: Self = Self { $($rule: true),* };
        }
    };
}

rules! {
    /// A node never overwrites a lock, even for the same owner.
    lock_is_kept
    /// A release leaves the watermark at its T or above.
    release_leaves_a_tombstone
    /// A release deletes only a lock whose T is not newer than its own.
    release_keeps_newer
    /// A node refuses a T that is too far from its own time.
    clock_is_checked
    /// A node grants only a T above the last one that it stored for the lock.
    watermark_is_checked
    /// A node refuses lock operations unless its admitting marker stands.
    marker_is_checked
    /// A node that lost its data is admitted only when every lock that it may have lost has ended.
    /// By then every gateway mints larger tokens than those that the node may have lost.
    quarantine_is_waited
    /// A quarantine ends only if the marker whose age was counted is still there.
    quarantine_has_nonce
    /// A quarantine counts only for the process in which it began.
    admission_names_process
    /// Evictions since a node was admitted make its memory suspect.
    evictions_are_counted
    /// A restarted node whose append-only file was rewritten since then is not trusted to have
    /// loaded all its data.
    rewrite_is_noticed
    /// A gateway accepts no marker older than the last one by which it admitted the node.
    newest_marker_is_known
    /// Bootstrap (no quarantine in a new cluster) is confirmed only when all nodes answer and are
    /// new.
    word_needs_all_nodes
    /// Bootstrap is confirmed only when every gateway, with or without `--bootstrap`, has seen the
    /// nodes as new.
    word_needs_witnesses
    /// A bootstrap confirmation holds for the quarantine that the gateway probed, not for a later
    /// one.
    word_names_quarantine
    /// A bootstrap confirmation ends when the first node is admitted.
    word_ends_with_admission
    /// A gateway counts no quarantine of another configuration.
    marker_names_configuration
    /// A change of configuration waits until no lock of the old configuration can live.
    reconfiguration_waits
    /// Each admission writes its own marker: a node refuses messages from before its loss of data.
    marker_names_admission
    /// A successful extension sets the lock again on nodes that lost it.
    missing_is_repaired
    /// A repair is accepted however old its T is: T is as old as the lock.
    repair_may_be_old
    /// An extension marks the lock and its watermark, so a repair can tell an expired lock from a
    /// released one.
    extension_marks
    /// A release removes the mark of an extension.
    release_unmarks
    /// No repair is sent after the end of the lease that its extension gave.
    repair_is_timely
    /// Nonces tell two proposals of one owner apart if two gateways minted the same T for them.
    grants_have_nonces
    /// The undo of a failed proposal removes exactly its own grant, no other grant of the same
    /// owner.
    undo_is_exact
    /// An undo leaves an extended grant: another request of the same owner has confirmed it.
    undo_spares_extended
    /// A gateway returns the grant of an earlier request only after it was extended on a majority.
    told_again_is_extended
    /// The undo of a failed proposal sets the watermark back to its value before the proposal.
    failed_try_takes_fence_back
    /// An undo sets the watermark back only if no client was given its T. The release of a held
    /// lock never does.
    told_fence_stays
    /// An undo sets the watermark back only if it replaced no watermark, or one with the mark of an
    /// extension.
    plain_fence_stays
    /// An undo sets back only the watermark that its own proposal left.
    only_own_fence_goes
    /// An undo restores the watermark with the mark of an extension that stood before.
    fence_before_is_restored
    /// A release that relies on an existing watermark makes it permanent: no undo may set it back.
    release_settles_fence
    /// A watermark outlives its lock, or the release that left it, until the clock refuses every
    /// acquire that it kept out.
    fence_outlives_lock
    /// When a watermark ends, the clock refuses every repair whose extension began before it was
    /// set, or while its lock still stood.
    late_repair_is_refused
    /// A release that relies on an existing watermark gives it the life of a new one.
    release_prolongs_fence
    /// Recovery reads the other nodes only when no node accepts a token that the lost node may have
    /// stored.
    adoption_waits_for_clocks
    /// Recovery reads the other nodes only when no round that was open at the loss still counts
    /// answers.
    adoption_waits_for_rounds
    /// Recovery reads so many nodes that each grant the recovering node voted for is on at least
    /// one of them.
    adoption_needs_enough
    /// A lock that recovery finds keeps other owners out of the recovering node.
    lost_locks_are_recovered
    /// A grant is recovered only if a majority stores it without the node: no grant gets its
    /// majority by recovery.
    adoption_needs_majority
    /// If the lost vote may belong to several grants, nobody gets the lock until all of them have
    /// ended.
    adoption_blocks_longest
    /// A later recovery reads a blocker (a record of nobody) like a grant.
    adoption_remembers_blockers
    /// Recovery does not set a grant again if a release that may be for it has come meanwhile.
    adoption_minds_releases
    /// An admitted node catches up with every lock that a majority of the others stores, before the
    /// next node is stopped.
    admitted_is_caught_up
    /// Catching up sets a grant only if a majority stores it without the node.
    catch_up_needs_majority
    /// Catching up reads the other nodes after the admission under which it sets the lock.
    catch_up_follows_admission
    /// Catching up goes on while an unmarked watermark keeps out a lock that the others store
    /// extended.
    catch_up_outwaits_watermarks
    /// A repair that replaces a record of nobody lives at least as long as that record.
    repair_keeps_life
}

impl Rules {
    /// Whether a release may rely on a watermark until it expires.
    pub fn watermarks_last(&self) -> bool {
        self.told_fence_stays
            && self.plain_fence_stays
            && self.only_own_fence_goes
            && self.release_settles_fence
    }

    /// Whether a node refuses messages that were sent before it lost its data.
    pub fn tells_admissions_apart(&self) -> bool {
        self.marker_is_checked && self.marker_names_admission
    }
}

//! The rules that safety rests on, each with a switch. With a rule off, a model must find a
//! counter-example; otherwise it would prove nothing about the rule.

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident)*) => {
        /// Which rules are on. A field with the same name in `redlock_core::node::SafetyRules`
        /// means the same rule.
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
    /// By then every gateway mints tokens larger than those of the lost locks.
    quarantine_is_waited
    /// A quarantine ends only if the marker from which the gateway counted still stands on the
    /// node.
    quarantine_has_nonce
    /// A quarantine counts only for the process of the node in which it began.
    admission_names_process
    /// If a node has evicted keys since it was admitted, its memory of locks is suspect.
    evictions_are_counted
    /// If a restarted node has rewritten its append-only file since the restart, that file may
    /// differ from the one that the process loaded. So the gateway does not trust that the process
    /// has all the data.
    rewrite_is_noticed
    /// After a gateway has admitted a node by a marker, it accepts no older marker of that node.
    newest_marker_is_known
    /// Bootstrap means that a new cluster needs no quarantine. A gateway confirms it only when all
    /// nodes answer and are new.
    bootstrap_needs_all_nodes
    /// Bootstrap is confirmed only when every gateway, started with or without `--bootstrap`, has
    /// seen the nodes as new.
    bootstrap_needs_witnesses
    /// A bootstrap confirmation ends only the quarantine that the gateway had probed, not a later
    /// quarantine of the same node.
    bootstrap_names_quarantine
    /// A gateway that has admitted its first node confirms no bootstrap any more.
    bootstrap_ends_with_admission
    /// A gateway counts only quarantines whose marker names its own configuration.
    marker_names_configuration
    /// A quarantine lasts by the largest TTL bound that the gateway has seen in a marker.
    larger_bound_is_waited
    /// A quarantine ends only when the gateway has probed a majority of the nodes since it began.
    majority_is_probed
    /// A node votes only for gateways whose `max_ttl` is within the limit of its marker.
    limit_is_checked
    /// The limit in markers rises only when the bound of every marker has risen.
    bounds_rise_first
    /// A change of configuration waits until every lock of the old configuration has ended.
    reconfiguration_waits
    /// Each admission writes its own marker. So a node refuses messages that were sent before it
    /// lost its data.
    marker_names_admission
    /// A successful extension sets the lock again on nodes that do not store it.
    missing_is_repaired
    /// A node accepts a repair however old its T is: a lock that is extended for long has an old T.
    repair_may_be_old
    /// An extension marks the lock and its watermark, so a repair can tell an expired lock from a
    /// released one.
    extension_marks
    /// A release removes the mark of an extension.
    release_unmarks
    /// A gateway sends no repair after the end of the lease that the extension gave.
    repair_is_timely
    /// Two gateways may mint the same T for two proposals of one owner. The nonce tells these
    /// grants apart.
    grants_have_nonces
    /// The undo of a failed proposal removes exactly its own grant, no other grant of the same
    /// owner.
    undo_is_exact
    /// An undo leaves an extended grant in place, because another request of the same owner has
    /// confirmed it.
    undo_spares_extended
    /// A gateway answers with the grant of an earlier request only after a majority has extended
    /// that grant.
    returned_again_is_extended
    /// The undo of a failed proposal sets the watermark back to its value before the proposal.
    undo_restores_watermark
    /// An undo sets the watermark back only if no client ever received its T. The release of a lock
    /// that a client held never sets it back.
    returned_watermark_stays
    /// An undo sets the watermark back only if its own proposal has set it.
    only_own_watermark_goes
    /// An undo removes the watermark only if none stood before the proposal. Otherwise it restores
    /// the earlier watermark, with its mark and its own end.
    earlier_watermark_is_restored
    /// A release may find that a watermark at its T or above stands already. It then makes that
    /// watermark permanent, so that no undo sets it back.
    release_settles_watermark
    /// A watermark outlives its lock, or the release that left it. It lasts until the node's clock
    /// refuses every acquire that the watermark kept out.
    watermark_outlives_lock
    /// When a watermark expires, the node's clock refuses the repairs of two kinds of extensions:
    /// those that began before the watermark was set, and those that began while its lock still
    /// stood.
    late_repair_is_refused
    /// A release may rely on a watermark that stands already. It then prolongs that watermark to
    /// the life of a new one.
    release_prolongs_watermark
    /// Recovery reads the other nodes only when no node accepts a token any more that the
    /// recovering node may have stored before its loss.
    recovery_waits_for_clocks
    /// Recovery reads the other nodes only when every round that was open at the loss has stopped
    /// counting answers.
    recovery_waits_for_rounds
    /// Recovery reads enough nodes: every grant that may have counted the recovering node's vote is
    /// on at least one of them.
    recovery_needs_enough
    /// A lock that recovery finds on another node keeps other owners out of the recovering node.
    lost_locks_are_recovered
    /// A grant is recovered only if a majority without the recovering node stores it. So recovery
    /// never completes the majority of a grant.
    recovery_needs_majority
    /// Several grants may have counted the lost vote. Then the recovering node gives the lock to
    /// nobody until all of them have ended.
    recovery_blocks_longest
    /// A later recovery treats a blocker that it reads (a record of nobody) like a grant.
    recovery_remembers_kept_free_records
    /// If a release that may be for a grant has arrived at the recovering node, recovery does not
    /// set that grant again.
    recovery_minds_releases
    /// After its admission a node catches up with every lock that a majority of the others stores.
    /// The next node is stopped only afterwards.
    admitted_is_caught_up
    /// Catching up sets a grant only if a majority without this node stores it.
    catch_up_needs_majority
    /// A node sets a lock by catching up only if the others were read after its present admission.
    catch_up_follows_admission
    /// A watermark may keep out a lock that a majority of the others stores. Catching up then goes
    /// on until that watermark has expired.
    catch_up_outwaits_watermarks
    /// A repair that replaces a record of nobody lives at least as long as that record.
    repair_keeps_life
    /// A client asks for all names of a set at once. It holds no name while it waits for another.
    sets_are_whole
    /// A node that refuses a name of a set keeps none of the set's names.
    refused_set_is_undone
    /// A node extends all names of a set in one step.
    set_is_extended_in_one_step
    /// A repetition whose confirmation was refused undoes the grant and extends it once more, before
    /// it releases the grant.
    refusal_is_repeated
    /// The second refusal of a node counts only if the node has carried out the undo.
    refusal_needs_undo
    /// A gateway counts a node only if the node granted all names of the set.
    whole_sets_count
    /// A gateway picks the slot of a lock with several slots. Nodes do not pick.
    gateway_picks_slots
    /// A gateway asks all nodes for the same slot, and counts votes for that slot only.
    votes_are_per_slot
}

impl Rules {
    /// Whether a release may rely on an existing watermark until that watermark expires.
    pub fn watermarks_last(&self) -> bool {
        self.returned_watermark_stays
            && self.earlier_watermark_is_restored
            && self.only_own_watermark_goes
            && self.release_settles_watermark
    }

    /// Whether a node refuses messages that were sent before it lost its data.
    pub fn tells_admissions_apart(&self) -> bool {
        self.marker_is_checked && self.marker_names_admission
    }
}

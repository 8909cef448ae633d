//! The rules that safety rests on, each with a switch. With a rule off its model must find a counter-example, or the
//! model would prove nothing about it.

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident)*) => {
        /// Which rules are on. Fields that `redlock_core::node::Rules` has as well mean the same there.
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
    /// A node never overwrites a lock, not even for its owner.
    lock_is_kept
    /// A release leaves the fence at T or above.
    release_leaves_a_tombstone
    /// A release deletes only a lock whose T is not newer than its own.
    release_keeps_newer
    /// A node refuses a T too far from its own time.
    clock_is_checked
    /// A node grants only a T larger than the last it has stored for the lock.
    watermark_is_checked
    /// A node refuses lock operations unless the marker of its eligibility stands.
    marker_is_checked
    /// A node that lost its data is admitted only when every lock that it may have lost has ended, and every
    /// gateway mints larger tokens than those it may have lost.
    quarantine_is_waited
    /// A quarantine ends only when the very marker stands whose age was counted.
    quarantine_has_nonce
    /// A quarantine counts only for the process that it began in.
    admission_names_process
    /// Evictions since its eligibility make the memory of a node suspect.
    evictions_are_counted
    /// A restarted node whose append-only file was rewritten since does not pass for one that has loaded all it had stored.
    rewrite_is_noticed
    /// A gateway believes no older marker than the last by which it has admitted the node.
    newest_marker_is_known
    /// The word that a cluster is new is believed only when all nodes answer and are new.
    word_needs_all_nodes
    /// And only when no gateway without that word has seen them so.
    word_needs_witnesses
    /// It is said of the one quarantine of a node that was looked at, not of the next.
    word_names_quarantine
    /// It ends with the first eligibility of a node.
    word_ends_with_admission
    /// A gateway counts no quarantine of another configuration.
    marker_names_configuration
    /// A change of configuration waits until no lock of the old one can live.
    reconfiguration_waits
    /// Every eligibility has a marker of its own: what was sent before a loss of data is refused after it.
    marker_names_admission
    /// A successful extension sets the lock again on nodes that lost it.
    missing_is_repaired
    /// A repair is not held to the age of its T, which is the age of the lock.
    repair_may_be_old
    /// An extension marks the lock and its fence, so that a repair can tell a lock that expired from one that was released.
    extension_marks
    /// A release takes the mark away.
    release_unmarks
    /// No repair is sent after the lease has ended that its extension gave.
    repair_is_timely
    /// Two tries of one owner that ask with the same T, at two gateways, are told apart all the same.
    grants_have_nonces
    /// The undo of a failed try takes nothing but exactly its grant: nothing that the owner has by another.
    undo_is_exact
    /// And not once it was extended: another request of the same owner has confirmed it.
    undo_spares_extended
    /// A grant of an earlier request is told again only when it has been extended on a majority.
    told_again_is_extended
    /// The undo of a failed try takes the fence back to what it was before the try was granted.
    failed_try_takes_fence_back
    /// It does so only where nobody was told of its T: never the release of a lock that was held.
    told_fence_stays
    /// A fence can be taken back only where it took the place of none, or of one with the mark of an extension.
    plain_fence_stays
    /// A try takes back only the fence that it has left itself.
    only_own_fence_goes
    /// Where a marked fence stood before, it stands again.
    fence_before_is_restored
    /// A release that finds a fence which keeps out what it must keep out makes it stay.
    release_settles_fence
    /// A fence outlives its lock, or the release that left it, until the clock refuses every acquire that it kept out.
    fence_outlives_lock
    /// Then the clock also refuses every repair whose extension had begun when the fence was set, or its lock still stood.
    late_repair_is_refused
    /// A release gives a fence that it counts on as long a life as one of its own.
    release_prolongs_fence
    /// What a node that lost its data adopts is read only when no node takes a token any more that it may have stored.
    adoption_waits_for_clocks
    /// And when no round that was open at the loss counts an answer any more.
    adoption_waits_for_rounds
    /// It is read from so many others that one of them has what the lost node has voted for.
    adoption_needs_enough
    /// What is found there keeps others out of the node that adopts.
    lost_locks_are_recovered
    /// A grant is recovered only if a majority stores it without the node: none gets a majority by recovery.
    adoption_needs_majority
    /// Where it is unknown which of several grants the lost vote was for, nobody gets the lock until all of them have ended.
    adoption_blocks_longest
    /// That a node is kept from voting so is remembered like a grant.
    adoption_remembers_blockers
    /// Where a release has come meanwhile, what it may have been for is not set again.
    adoption_minds_releases
    /// A node that was admitted is given every lock that a majority of the others stores, before the next one is stopped.
    admitted_is_caught_up
    /// It is given a grant only if so many others store it that they are a majority without the node.
    catch_up_needs_majority
    /// What is read for it is read after the eligibility under which it is given the lock.
    catch_up_follows_admission
    /// A repair that takes the place of a record of nobody lives at least as long as that.
    repair_keeps_life
}

impl Rules {
    /// Whether what counts on a fence can count on it for good.
    pub fn fences_last(&self) -> bool {
        self.told_fence_stays
            && self.plain_fence_stays
            && self.only_own_fence_goes
            && self.release_settles_fence
    }

    /// Whether a node refuses what was sent before it lost its data.
    pub fn tells_admissions_apart(&self) -> bool {
        self.marker_is_checked && self.marker_names_admission
    }
}

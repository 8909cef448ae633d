//! The Lua scripts.

pub(super) const SWAP_MARKER: &str = include_str!("../swap_marker.lua");
pub(super) const STORED: &str = include_str!("../stored.lua");
pub(super) const CAUGHT_UP: &str = include_str!("../caught_up.lua");
pub(super) const RECOVER: &str = include_str!("../recover.lua");
const LOCKS: &str = include_str!("../locks.lua");

use crate::node::SafetyRules;

/// The script of lock operations; in a `mutation-testing` build with the given rules. Its text
/// begins with the run_id, so its digest differs for every Redis process. A process that was
/// started later answers NOSCRIPT to a call for the earlier process, even before we notice the
/// restart.
pub(super) fn locks(run_id: &str, rules: SafetyRules) -> String {
    let switch = |text: String, (name, on): (&str, bool)| {
        text.replace(&format!("local {name} = true"), &format!("local {name} = {on}"))
    };
    switches(rules).into_iter().filter(|(_, on)| !on).fold(format!("-- {run_id}\n{LOCKS}"), switch)
}

/// Whether all rules that run on a master are on.
pub(super) fn all_on(rules: SafetyRules) -> bool {
    switches(rules).into_iter().all(|(_, on)| on)
}

fn switches(rules: SafetyRules) -> [(&'static str, bool); 9] {
    [
        ("RULE_LOCK_IS_KEPT", rules.lock_is_kept),
        ("RULE_RELEASE_LEAVES_A_TOMBSTONE", rules.release_leaves_a_tombstone),
        ("RULE_RELEASE_KEEPS_NEWER", rules.release_keeps_newer),
        ("RULE_UNDO_IS_EXACT", rules.undo_is_exact),
        ("RULE_CLOCK_IS_CHECKED", rules.clock_is_checked),
        ("RULE_WATERMARK_IS_CHECKED", rules.watermark_is_checked),
        ("RULE_MARKER_IS_CHECKED", rules.marker_is_checked),
        ("RULE_REFUSED_SET_IS_UNDONE", rules.refused_set_is_undone),
        ("RULE_LIVES_BEGIN_WHEN_ASKED", rules.lives_begin_when_asked),
    ]
}

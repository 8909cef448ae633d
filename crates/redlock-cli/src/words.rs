//! A lock in words, one line each.

use redlock_client::{LockStatus, SlotHolder, Waiter, WatchEvent};

/// The state of a lock.
pub(crate) fn status(status: &LockStatus) -> String {
    if let Some(slots) = status.slots.filter(|_| !status.holders.is_empty()) {
        let held = format!("{}: {} of {slots} slots are held", status.name, status.holders.len());
        let unknown: Vec<_> = status.unknown_slots.iter().map(u32::to_string).collect();
        return match unknown.is_empty() {
            true => held,
            false => format!("{held}; these may be held: {}", unknown.join(", ")),
        };
    }
    hold(status, status.state.as_str())
}

/// A hold of a lock or of one of its slots, with what happened to it.
fn hold(status: &LockStatus, what: &str) -> String {
    let LockStatus { owner, key, fencing_token, expires_in_ms, acquired_at, metadata, .. } = status;
    let mut words = format!("{} {what}", subject(status));
    let mut add = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            words += &format!("{what}{value}");
        }
    };
    add(" by ", owner.as_ref().map(|owner| format!("{owner:?}")));
    add(" with key ", key.as_ref().map(|key| format!("{key:?}")));
    add(" since ", acquired_at.clone());
    add(", expires in ", expires_in_ms.map(|left| format!("{} unless extended", seconds(left))));
    add(", fencing token ", fencing_token.map(|token| token.to_string()));
    for (key, value) in metadata {
        add(", ", Some(format!("{key:?} = {value:?}")));
    }
    words
}

/// The end of a hold: what happened, and the words before the holder.
fn end(status: &LockStatus, what: &str, by: &str) -> String {
    let holder = status.owner.as_ref().map_or_else(String::new, |owner| format!("{by} {owner:?}"));
    let token = status.fencing_token.map_or_else(String::new, |it| format!(", fencing token {it}"));
    format!("{} {what}{holder}{token}", subject(status))
}

fn subject(status: &LockStatus) -> String {
    let slot = status.slot.map_or_else(String::new, |slot| format!(" slot {slot}"));
    format!("{}:{slot}", status.name)
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.1} s", milliseconds as f64 / 1000.0)
}

/// The holder of each slot of a lock.
pub(crate) fn holders(status: &LockStatus) -> impl Iterator<Item = String> {
    status.holders.iter().map(holder)
}

fn holder(of_slot: &SlotHolder) -> String {
    let SlotHolder { slot, holder, fencing_token, expires_in_ms, acquired_at } = of_slot;
    let since = acquired_at.as_ref().map_or_else(String::new, |at| format!(" since {at}"));
    let left = expires_in_ms
        .map_or_else(String::new, |left| format!(", expires in {} unless extended", seconds(left)));
    let token = fencing_token.map_or_else(String::new, |it| format!(", fencing token {it}"));
    format!("slot {slot}: {}{since}{left}{token}", label(holder))
}

/// The line for a lock at the gateway that answered.
pub(crate) fn waiters(status: &LockStatus) -> Vec<String> {
    let line =
        status.waiters.iter().enumerate().map(|(at, Waiter { owner, waiting_since, .. })| {
            format!("{}. in line: {} since {waiting_since}", at + 1, label(owner))
        });
    let mut lines: Vec<_> = line.collect();
    let further = status.waiters_total.unwrap_or(0).saturating_sub(status.waiters.len() as u64);
    if further > 0 {
        lines.push(format!("{further} more in line"));
    }
    lines
}

fn label(owner: &Option<String>) -> String {
    owner.as_ref().map_or_else(|| "somebody".into(), |label| format!("{label:?}"))
}

/// An event of a lock. Empty for events about the connection. A snapshot of a prefix has a line for
/// each held lock.
pub(crate) fn event(event: &WatchEvent) -> Vec<String> {
    let line = match event {
        WatchEvent::Snapshot(snapshot) => {
            let locks = snapshot.locks().iter();
            let mut lines: Vec<_> = locks
                .flat_map(|lock| {
                    let name = &lock.name;
                    let slots = holders(lock).map(move |holder| format!("{name}: {holder}"));
                    std::iter::once(status(lock)).chain(slots)
                })
                .collect();
            if !snapshot.is_complete() {
                lines.push(
                    "the gateway does not show or follow all held locks; watch a longer prefix"
                        .into(),
                );
            }
            if lines.is_empty() {
                lines.push("no lock is held".into());
            }
            return lines;
        }
        WatchEvent::Held(status) => hold(status, "held"),
        WatchEvent::Extended(status) => hold(status, "extended"),
        WatchEvent::Released(status) => end(status, "released", " by"),
        WatchEvent::Expired(status) => end(status, "expired", ", held by"),
        WatchEvent::Forced(status) => end(status, "released by force", ", held by"),
        WatchEvent::Waiters(status) => {
            let first = status.waiters.first().map(|first| label(&first.owner));
            let first = first.map_or_else(String::new, |first| format!(", first {first}"));
            match status.waiters_total.unwrap_or(0) {
                0 => format!("{}: nobody waits", status.name),
                1 => format!("{}: 1 waits{first}", status.name),
                total => format!("{}: {total} wait{first}", status.name),
            }
        }
        WatchEvent::Lagged { missed } => {
            format!("{missed} events were missed, because they were not read in time")
        }
        _ => return Vec::new(),
    };
    vec![line]
}

//! Conversions from the core's types to the shapes on the wire, which `redlock_api` declares.
//! `extract` checks what requests ask for; `error` has the texts of errors.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlock_api::{
    Health, Lease, LockList, LockSnapshot, LockState, LockStatus, NodeAnswer, NodeHealth,
    SlotHolder, Waiter,
};
use redlock_core::node::NodeStatus;
use redlock_core::{HeldBy, Inspection, LockName, NodeReport, NodeView, Priority, SlotSet};
use serde::Serialize;

use crate::gateway::{Change, Event, LeaseView, ListView, Readiness};
use crate::info::{LockMetadata, label_of};
use crate::remedy::{PublicUrl, advice, section};

/// A granted or extended lock, with the label from the request.
pub fn lease(name: &LockName, view: &LeaseView, owner: Option<String>) -> Lease {
    Lease {
        name: name.as_str().into(),
        token: view.token.expose(),
        fencing_token: view.token.fencing().get(),
        ttl_ms: view.ttl.millis(),
        // Both are rounded down, which can only shorten the time that a client trusts.
        validity_ms: view.validity.as_millis() as u32,
        elapsed_ms: view.elapsed.as_millis() as u64,
        expires_at: rfc3339(view.expires_at),
        owner,
        nodes_granted: view.nodes_granted as u32,
        nodes_total: view.nodes_total as u32,
        waiters: None,
        slots: None,
        slots_held: Some(view.token.slots())
            .filter(|slots| *slots != SlotSet::FIRST)
            .map(|slots| slots.iter().map(u32::from).collect()),
    }
}

/// The holder of a slot. `with_token`: whether the fencing token is shown.
pub(super) fn slot_holder(holder: &redlock_core::SlotHolder, with_token: bool) -> SlotHolder {
    let redlock_core::SlotHolder { slot, by } = holder;
    let fencing = by.fencing.filter(|_| !by.is_kept_free());
    SlotHolder {
        slot: (*slot).into(),
        holder: label_of(&by.info),
        fencing_token: fencing.filter(|_| with_token).map(|token| token.get()),
        expires_in_ms: by.expires_in.map(|left| left.as_millis() as u64),
        acquired_at: fencing.map(|token| rfc3339(token.get())),
    }
}

pub(super) fn rfc3339(micros: u64) -> String {
    let time: SystemTime = UNIX_EPOCH + Duration::from_micros(micros);
    humantime::format_rfc3339_millis(time).to_string()
}

/// The node's answer in a round. `at`: its place among the nodes. `with_names`: see [`shown`].
pub(super) fn node_answer(report: NodeReport, at: usize, with_names: bool) -> NodeAnswer {
    use redlock_core::NodeAnswer as A;
    let (state, detail) = match report.answer {
        A::Agreed => ("agreed", None),
        A::Refused(why) => ("refused", Some(why.to_owned())),
        A::Failed(failure) => (failure.reason.as_str(), Some(failure.detail)),
        A::Pending => ("pending", None),
    };
    let detail = detail.filter(|detail| !detail.is_empty());
    shown(NodeAnswer { node: report.node, state: state.into(), detail }, at, with_names)
}

/// Replaces name and detail, which reveal addresses, by a number for callers who may not see
/// nodes.
fn shown(answer: NodeAnswer, at: usize, with_names: bool) -> NodeAnswer {
    if with_names {
        answer
    } else {
        NodeAnswer { node: format!("node-{}", at + 1), detail: None, ..answer }
    }
}

/// `with_names`: whether the caller may see the names of the nodes.
pub(super) fn lock_status(
    name: &LockName,
    inspection: Inspection,
    (waiters, total): (Vec<(redlock_core::Waiter, u64)>, usize),
    with_names: bool,
) -> LockStatus {
    let nodes = inspection.nodes.into_iter().enumerate().map(|(at, (node, view))| {
        let (state, detail) = match view {
            NodeView::Held => ("held", None),
            NodeView::Free => ("free", None),
            NodeView::Pending => ("pending", None),
            NodeView::Failed(failure) => (failure.reason.as_str(), Some(failure.detail)),
        };
        shown(NodeAnswer { node, state: state.into(), detail }, at, with_names)
    });
    let holders = inspection.holders;
    let asked = holders.iter().filter_map(|holder| LockMetadata::read(&holder.by.info).slots);
    let slots = asked.chain(holders.iter().map(|holder| holder.slot)).max().filter(|it| *it > 1);
    // Of a lock with slots, slot 1 may be free although others are held.
    let state = match (inspection.state, holders.first()) {
        (redlock_core::LockState::Free | redlock_core::LockState::Unknown, Some(first)) => {
            redlock_core::LockState::Held(first.by.clone())
        }
        (redlock_core::LockState::Free, None) if !inspection.unknown_slots.is_empty() => {
            redlock_core::LockState::Unknown
        }
        (state, _) => state,
    };
    // If nothing is known of any slot, the state says so.
    let unknown = inspection.unknown_slots.into_iter().map(u32::from);
    let unknown_slots = match holders.is_empty() && state == redlock_core::LockState::Unknown {
        true => Vec::new(),
        false => unknown.collect(),
    };
    LockStatus {
        nodes: Some(nodes.collect()),
        waiters: waiters.into_iter().map(waiter).collect(),
        waiters_total: shown_length(total),
        slots: slots.map(u32::from),
        holders: match slots {
            None => Vec::new(),
            Some(_) => holders.iter().map(|holder| slot_holder(holder, true)).collect(),
        },
        unknown_slots,
        ..majority_view(name, state)
    }
}

/// A page of held locks. `shows`: whether the caller may see more of a lock than that it is held.
pub(super) fn lock_list(
    page: ListView,
    line_length: impl Fn(&LockName) -> usize,
    shows: impl Fn(&LockName) -> bool,
) -> LockList {
    let status = |(stored, state): (LockName, _)| {
        let (name, slot) = stored.lock_and_slot();
        let shows = shows(&name);
        let status = match state {
            redlock_core::LockState::Held(_) if !shows => {
                status_of(&name, LockState::Held, HeldBy::default())
            }
            state => majority_view(&name, state),
        };
        let slot = Some(slot.into()).filter(|slot| *slot > 1);
        let waiters_total = if shows { shown_length(line_length(&name)) } else { None };
        LockStatus { slot, waiters_total, ..status }
    };
    LockList { locks: page.locks.into_iter().map(status).collect(), next_cursor: page.next }
}

/// The event name and the data of a change. `None` if the caller may see nothing. `shows`: whether
/// the caller may see the holder.
pub(super) fn change(change: &Change, shows: bool) -> Option<(&'static str, LockStatus)> {
    let ended = |by: &HeldBy| status_of(&change.name, LockState::Free, by.clone());
    let held = |by: &HeldBy| status_of(&change.name, LockState::Held, by.clone());
    let (word, status) = match &change.event {
        Event::Held(by) => ("held", held(by)),
        Event::Extended(by) => ("extended", held(by)),
        Event::Released(by) => ("released", ended(by)),
        Event::Expired(by) => ("expired", ended(by)),
        Event::Forced(by) => ("forced", ended(by)),
        Event::Waiters(..) if !shows => return None,
        Event::Waiters(waiters, total) => {
            let status = status_of(&change.name, LockState::Unknown, HeldBy::default());
            let waiters = waiters.iter().cloned().map(waiter).collect();
            ("waiters", LockStatus { waiters, waiters_total: Some(*total as u64), ..status })
        }
    };
    let status = match shows {
        true => status,
        false => status_of(&change.name, status.state, HeldBy::default()),
    };
    let slot = Some(change.slot.into()).filter(|slot| *slot > 1);
    Some((word, LockStatus { slot, ..status }))
}

/// The status for a caller without the permission to inspect the lock.
pub(super) fn state_only(name: &LockName, status: LockStatus) -> LockStatus {
    let waiters_total = status.waiters_total;
    LockStatus { waiters_total, ..status_of(name, status.state, HeldBy::default()) }
}

/// The held locks of a stream about a prefix.
pub(super) fn lock_snapshot(
    locks: Vec<(LockName, HeldBy)>,
    is_complete: bool,
    line_length: impl Fn(&LockName) -> usize,
    shows: impl Fn(&LockName) -> bool,
) -> LockSnapshot {
    let status = |(stored, by): (LockName, HeldBy)| {
        let (name, slot) = stored.lock_and_slot();
        let shows = shows(&name);
        let by = if shows { by } else { HeldBy::default() };
        let slot = Some(slot.into()).filter(|slot| *slot > 1);
        let waiters_total = if shows { shown_length(line_length(&name)) } else { None };
        LockStatus { slot, waiters_total, ..status_of(&name, LockState::Held, by) }
    };
    LockSnapshot { locks: locks.into_iter().map(status).collect(), is_complete }
}

/// The length of a line, unless nobody waits.
fn shown_length(length: usize) -> Option<u64> {
    (length > 0).then_some(length as u64)
}

fn waiter((waiter, since): (redlock_core::Waiter, u64)) -> Waiter {
    Waiter {
        owner: label_of(waiter.info.as_bytes()),
        waiting_since: rfc3339(since),
        is_away: waiter.is_away,
        priority: Some(waiter.priority).filter(|it| *it != Priority::default()).map(Priority::get),
    }
}

fn majority_view(name: &LockName, state: redlock_core::LockState) -> LockStatus {
    use redlock_core::LockState as S;
    match state {
        S::Held(by) => status_of(name, LockState::Held, by),
        S::Free => status_of(name, LockState::Free, HeldBy::default()),
        S::Unknown => status_of(name, LockState::Unknown, HeldBy::default()),
    }
}

fn status_of(name: &LockName, state: LockState, by: HeldBy) -> LockStatus {
    let LockMetadata { owner, key, metadata, slots } = LockMetadata::read(&by.info);
    LockStatus {
        name: name.as_str().into(),
        state,
        owner,
        metadata,
        key,
        fencing_token: by.fencing.map(|token| token.get()),
        expires_in_ms: by.expires_in.map(|left| left.as_millis() as u64),
        acquired_at: by.fencing.map(|token| rfc3339(token.get())),
        slot: None,
        slots: slots.map(u32::from),
        holders: Vec::new(),
        unknown_slots: Vec::new(),
        nodes: None,
        may_force: None,
        waiters: Vec::new(),
        waiters_total: None,
    }
}

pub(super) fn alive() -> Health {
    Health { status: "alive".into(), nodes: None, runbook: None }
}

/// Without the nodes, whose addresses not everybody may see.
pub(super) fn health_without_nodes(readiness: Readiness, url: &PublicUrl) -> Health {
    let (status, runbook) = match readiness {
        Readiness::Ready => ("ready", None),
        Readiness::NoQuorum => ("no_quorum", Some(section::QUORUM_LOST)),
        Readiness::Draining => ("draining", Some(section::DRAINING)),
    };
    Health {
        status: status.into(),
        nodes: None,
        runbook: runbook.map(|section| url.link(section).into()),
    }
}

pub(super) fn health(
    readiness: Readiness,
    nodes: Vec<(String, NodeStatus)>,
    url: &PublicUrl,
) -> Health {
    let said = |text: String| Some(text).filter(|text| !text.is_empty());
    let now = SystemTime::now();
    let left = |until: u64| (UNIX_EPOCH + Duration::from_micros(until)).duration_since(now).ok();
    let nodes = nodes.into_iter().map(|(node, status)| NodeHealth {
        node,
        advice: advice(&status, status.until_micros.and_then(left)),
        state: status.state.as_str().to_owned(),
        since: rfc3339(status.since_micros),
        until: status.until_micros.map(rfc3339),
        detail: said(status.detail),
        engine: status.engine.map(|engine| engine.as_str().to_owned()),
        restarts: status.restarts,
        evicted_keys: status.evicted_keys,
    });
    Health { nodes: Some(nodes.collect()), ..health_without_nodes(readiness, url) }
}

/// JSON with a newline, for people who read it in a terminal.
pub fn json_line(body: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    // Enough room for an answer about one lock.
    let mut line = Vec::with_capacity(512);
    serde_json::to_writer(&mut line, body)?;
    line.push(b'\n');
    Ok(line)
}

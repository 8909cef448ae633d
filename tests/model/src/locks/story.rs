//! Narrates counter-examples.

use redlock_core::node::ReleaseScope;

use super::bounds::{Locks, NODES};
use super::reading::{CatchUp, Reading};
use super::state::{Action, Message, Phase, Release, State, owner, sibling};
use crate::node::{FAR, Node, Owner, Token, Vote};

impl Locks {
    /// Narrates a path step by step. The nodes of a state are sorted, so a node changes its
    /// position. The story gives each node one name from beginning to end.
    pub(super) fn story(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let mut names: [usize; NODES] = std::array::from_fn(|i| i + 1);
        let mut story = path.first().map(|(state, _)| begin(state)).unwrap_or_default();
        for (state, action) in path {
            let Some(action) = action else { break };
            let next = self.apply(&state, action);
            story.push(self.narrate_step(&state, &next, action, &names));
            let mut order: [usize; NODES] = std::array::from_fn(|i| i);
            order.sort_by_key(|at| next.sites[*at]);
            names = order.map(|at| names[at]);
        }
        story
    }

    fn narrate_step(
        &self,
        s: &State,
        next: &State,
        action: Action,
        names: &[usize; NODES],
    ) -> String {
        let who = |proposal: u8| {
            let t = token(s.proposals[usize::from(proposal)].token);
            format!("{} with {t}", name(owner(proposal.into())))
        };
        let of = |renewal: u8| s.renewals[usize::from(renewal)].of.unwrap_or_default();
        let node = |site: u8| format!("node {}", names[usize::from(site)]);
        match action {
            Action::Start { proposal, phase } => start(s, proposal.into(), phase),
            Action::Acquire { proposal, site } => {
                let phase = s.proposals[usize::from(proposal)].phase;
                let late = if phase == Phase::GivenUp { ", late," } else { "" };
                let i = usize::from(proposal);
                let verb = match next.sites[usize::from(site)].acquires[i] {
                    Message::No | Message::Failed => "refuses",
                    Message::Yours => "already has another grant of",
                    _ => "grants",
                };
                let stored =
                    next.sites[usize::from(site)].node.lock.map_or(String::new(), |lock| {
                        let differs = lock.token != s.proposals[i].token || lock.owner != owner(i);
                        if differs {
                            format!(" (it stores {} with {})", name(lock.owner), token(lock.token))
                        } else {
                            String::new()
                        }
                    });
                format!("{}{late} {verb} {}{stored}", node(site), who(proposal))
            }
            Action::Grant { proposal, renewals } => {
                let extends = match renewals {
                    0 => "",
                    1 => ", and asks all nodes to extend it",
                    _ => ", and asks all nodes twice to extend it",
                };
                format!("{}: a majority has granted, so it holds the lock{extends}", who(proposal))
            }
            Action::GiveUp(proposal) => {
                let at = |site: &u8| {
                    next.sites[usize::from(*site)].undos[usize::from(proposal)] == Release::Sent
                };
                let nodes: Vec<_> = (0..NODES as u8).filter(at).map(node).collect();
                let releases = if nodes.is_empty() {
                    String::new()
                } else {
                    format!("; an undo goes to {}", nodes.join(", "))
                };
                format!("{} gives up{releases}", who(proposal))
            }
            Action::Release(proposal) => {
                format!("{} releases: a release goes to all nodes", who(proposal))
            }
            Action::ReleaseArrives { proposal, site } => {
                let mut at = s.sites[usize::from(site)].node;
                let i = usize::from(proposal);
                let scope = self.scope(s.sites[usize::from(site)].releases[i]);
                let deletes = self.end(&mut at, s, i, scope) == Vote::Released;
                let effect = if deletes { ": the lock is deleted" } else { "" };
                let watermark = next.sites[usize::from(site)].node.watermark;
                format!(
                    "the release of {} reaches {}{effect}; its watermark is {}",
                    who(proposal),
                    node(site),
                    token(watermark)
                )
            }
            Action::UndoArrives { proposal, site } => {
                let mut at = s.sites[usize::from(site)].node;
                let i = usize::from(proposal);
                let deletes =
                    at.release(&self.rules, self.window(s), s.asked(i), ReleaseScope::Proposal)
                        == Vote::Released;
                let effect = if deletes { ": the lock is deleted" } else { "" };
                let watermark = next.sites[usize::from(site)].node.watermark;
                format!(
                    "the undo of {} reaches {}{effect}; its watermark is {}",
                    who(proposal),
                    node(site),
                    token(watermark)
                )
            }
            Action::Confirm { renewal, proposal } => {
                let other = sibling(usize::from(proposal)).unwrap_or_default() as u8;
                let asked = if self.rules.returned_again_is_extended {
                    ", and asks all nodes to extend it"
                } else {
                    ""
                };
                format!(
                    "{} learns that a majority has {}{asked}{}",
                    who(proposal),
                    who(other),
                    nth(renewal)
                )
            }
            Action::Renew { renewal, proposal } => {
                format!("{}{} extends: all nodes are asked", who(proposal), nth(renewal))
            }
            Action::Extend { renewal, site } => {
                let mut at = s.sites[usize::from(site)].node;
                let asked = s.asked_again(renewal.into());
                let vote = asked.map(|asked| at.extend(&self.rules, self.window(s), asked));
                let verb = match vote {
                    Some(Vote::Extended) => "extends",
                    Some(Vote::Missing) => "does not have the lock of",
                    _ => "does not extend",
                };
                let proved = next.renewals[usize::from(renewal)].proved
                    && !s.renewals[usize::from(renewal)].proved;
                let majority = if proved { ": a majority has extended the lock" } else { "" };
                format!("{} {verb} {}{}{majority}", node(site), who(of(renewal)), nth(renewal))
            }
            Action::Repair { renewal, site } => {
                let who = who(of(renewal));
                let nth = nth(renewal);
                let instead = match s.sites[usize::from(site)].node.lock {
                    Some(lock) => {
                        format!(", instead of a blocker with {}", token(lock.token))
                    }
                    None => String::new(),
                };
                format!("{} is repaired: it grants {who}{nth}{instead}", node(site))
            }
            Action::ReadForCatchUp { reading, target, site } => {
                let i = usize::from(reading);
                let at = usize::from(site);
                let begins = if s.readings[i] == Reading::Unbegun {
                    "catches up: "
                } else {
                    "still catches up: "
                };
                let sent = matches!(next.sites[usize::from(target)].catch_ups[i], CatchUp::Sent(_));
                let sent = if sent { "; a repair is on its way" } else { "" };
                let stored = stored(&s.sites[at].node);
                format!("{} {begins}{} is read and stores {stored}{sent}", node(target), node(site))
            }
            Action::CatchUp { site, .. } => {
                let at = usize::from(site);
                let before = stored(&s.sites[at].node);
                let after = stored(&next.sites[at].node);
                format!("the repair reaches {}: it stored {before}, and stores {after}", node(site))
            }
            Action::EndLease(proposal) => format!("the lease of {} ends", who(proposal)),
            Action::EndRenewalLease(renewal) => {
                format!("the lease of {}{} ends", who(of(renewal)), nth(renewal))
            }
            Action::Expire(site) => format!("the lock expires on {}", node(site)),
            Action::EndWatermark(site) => format!("the watermark of {} ends", node(site)),
            Action::Lose(site) => format!("{} loses all its data", node(site)),
            Action::ReadForRecovery(site) => {
                let begun = self
                    .recovering_site(s)
                    .is_some_and(|at| s.sites[at].suspicion.is_some_and(|d| d.recovered.is_some()));
                let wait = if begun {
                    ""
                } else {
                    "three times max_clock_skew have passed since the loss; "
                };
                format!(
                    "{wait}{} is read and stores {}",
                    node(site),
                    stored(&s.sites[usize::from(site)].node)
                )
            }
            Action::Recover => {
                let at = self.recovering_site(s).unwrap_or_default();
                format!(
                    "{} is admitted again, and recovers {}",
                    node(at as u8),
                    stored(&next.sites[at].node)
                )
            }
            Action::Readmit(site) => format!("{} is admitted again", node(site)),
        }
    }
}

/// The proposals that have begun in the first state. No other event has happened yet.
fn begin(s: &State) -> Vec<String> {
    let begun = s.proposals.iter().enumerate().filter(|(_, t)| t.phase != Phase::Idle);
    begun.map(|(i, t)| start(s, i, t.phase)).collect()
}

fn start(s: &State, i: usize, phase: Phase) -> String {
    let again = if i == 1 { "asks again, as the same owner" } else { "asks all nodes" };
    let then =
        if phase == Phase::GivenUp { ", and gives up; whatever it sets is undone" } else { "" };
    format!("{} with {} {again}{then}", name(owner(i)), token(s.proposals[i].token))
}

/// Names an extension by its number.
fn nth(renewal: u8) -> String {
    format!(" (extension {})", renewal + 1)
}

fn stored(at: &Node) -> String {
    let lock = at.lock.map_or("nothing".to_owned(), |lock| match lock.owner {
        Owner::Nobody => format!("a blocker with {}", token(lock.token)),
        owner => format!(
            "{} with {}{}",
            name(owner),
            token(lock.token),
            if lock.extended { ", extended" } else { "" }
        ),
    });
    format!("{lock}; its watermark is {}", token(at.watermark))
}

fn name(owner: Owner) -> &'static str {
    match owner {
        Owner::A => "A",
        Owner::B => "B",
        Owner::Nobody => "nobody",
    }
}

fn token(token: Token) -> String {
    if token == FAR { "T far ahead".into() } else { format!("T={token}") }
}

//! Translates the core's grants and votes into those of a history.

use redlock_core::node::{Failure, Reason, Record, Vote};
use redlock_core::types::{LockToken, Owner};

use crate::history::{Grant, VoteKind};

/// The grant of one of the core's records: its owner, token and nonce.
pub fn grant_of(record: &Record) -> Option<Grant> {
    let (token, _) = record.parse()?;
    Some(grant(&token))
}

/// The grant that a client's token contains.
pub fn grant(token: &LockToken) -> Grant {
    let text = token.expose();
    let digits = text.rsplit('.').next().unwrap_or_default();
    let number = |digits: Option<&str>| {
        digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or_default()
    };
    let owner = number(digits.get(..16));
    let nonce = number(digits.get(2 * Owner::LEN..));
    Grant { owner, fencing: token.fencing().get(), nonce: nonce as u32 }
}

/// The kind of a vote, without details.
pub fn vote_kind(vote: &Vote) -> VoteKind {
    match vote {
        Vote::Granted => VoteKind::Granted,
        Vote::Yours(_) => VoteKind::Yours,
        Vote::Held(_) => VoteKind::Held,
        Vote::Stale { .. } => VoteKind::Stale,
        Vote::Extended { .. } => VoteKind::Extended,
        Vote::Released => VoteKind::Released,
        Vote::Missing => VoteKind::Missing,
        Vote::Found(_) | Vote::FoundOfSet(_) => VoteKind::Found,
        Vote::Failed(Failure { reason: Reason::Quarantined, .. }) => VoteKind::Quarantined,
        Vote::Failed(Failure { reason: Reason::Clock, .. }) => VoteKind::Clock,
        Vote::Failed(_) | Vote::Each(_) => VoteKind::Error,
    }
}

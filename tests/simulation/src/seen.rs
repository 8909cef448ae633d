//! Grants and votes in the words of a history.

use redlock_core::node::{Failure, Reason, Record, Vote};
use redlock_core::types::{LockToken, Owner};

use crate::history::{Cast, Grant};

/// Owner and token of a record of ours.
pub fn grant_of(record: &Record) -> Option<Grant> {
    let (token, _) = record.parse()?;
    Some(grant(&token))
}

/// What a history calls it.
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

/// A vote, without the particulars.
pub fn cast(vote: &Vote) -> Cast {
    match vote {
        Vote::Granted => Cast::Granted,
        Vote::Yours(_) => Cast::Yours,
        Vote::Held(_) => Cast::Held,
        Vote::Stale { .. } => Cast::Stale,
        Vote::Extended { .. } => Cast::Extended,
        Vote::Released => Cast::Released,
        Vote::Missing => Cast::Missing,
        Vote::Found(_) => Cast::Found,
        Vote::Failed(Failure { reason: Reason::Quarantined, .. }) => Cast::Quarantined,
        Vote::Failed(Failure { reason: Reason::Clock, .. }) => Cast::Clock,
        Vote::Failed(_) => Cast::Error,
    }
}

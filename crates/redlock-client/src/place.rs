//! The place in line of one acquire, over all of its requests.

use redlock_api::Problem;

use crate::client::{Client, FailedRound, Route};
use crate::waiting::{Waiting, ordinal};

/// The place of one acquire, over all of its requests.
#[derive(Debug, Default)]
pub(crate) struct Place {
    /// The index of the gateway, and the position in its line.
    last: Option<(usize, u64)>,
    /// Whether it was reported that no gateway decides.
    is_outage_reported: bool,
}

impl Place {
    /// Notes an answer that the lock is held.
    pub(crate) fn held(
        &mut self,
        client: &Client,
        route: &Route,
        name: &str,
        problem: &Problem,
    ) -> Waiting {
        self.is_outage_reported = false;
        let position = problem.queue_position;
        let trouble = self.last.zip(position).and_then(|((gateway, before), now)| {
            let now_in_line = ordinal(now);
            if gateway != route.at {
                let why = route.last_failure.as_deref().unwrap_or("another gateway answers");
                let to = client.url(route.at);
                Some(format!("place in line lost: {why}; now {now_in_line} in line at {to}"))
            } else if now > before {
                let at = client.url(gateway);
                Some(format!("place in line lost at {at}; now {now_in_line} in line"))
            } else {
                None
            }
        });
        self.last = position.map(|position| (route.at, position)).or(self.last);
        Waiting {
            name: name.to_owned(),
            position,
            holder: problem.holder.clone(),
            acquired_at: problem.acquired_at.clone(),
            gateway: client.url(route.at).to_owned(),
            trouble,
        }
    }

    /// Notes that no gateway decides. Returns something only the first time.
    pub(crate) fn undecided(
        &mut self,
        client: &Client,
        route: &Route,
        name: &str,
        round: &FailedRound,
    ) -> Option<Waiting> {
        let what = if round.is_unreachable { "can be reached" } else { "decides" };
        let is_new = !std::mem::replace(&mut self.is_outage_reported, true);
        is_new.then(|| Waiting {
            name: name.to_owned(),
            position: None,
            holder: None,
            acquired_at: None,
            gateway: client.url(route.at).to_owned(),
            trouble: Some(format!("no gateway {what}, asking again: {}", round.heard.join("; "))),
        })
    }
}

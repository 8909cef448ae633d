//! Guards of one client renew together: one `PATCH /locks` extends all leases that are due at about
//! the same time.
//!
//! Each guard registers its lease here, and waits until the lease is due. When the first lease is
//! due, its guard extends the leases that are due soon with it, by one request. The request runs in
//! a task of its own, so a release of that guard does not end it. Each guard still watches its own deadline. A lease
//! that the joint request did not decide is extended by its guard alone.

use std::time::Duration;

use redlock_api::{ExtendManyBody, ExtendManyResults, ExtendResult, Problem};
use reqwest::Method;
use tokio::sync::oneshot;

use crate::client::{
    Backoff, Client, NoAnswer, SHORTEST_TRY, deadline_of, is_loss, millis, time_of_a_try,
};
use crate::clock::Moment;
use crate::http::Call;
use crate::together::{Due, Renewal, Renewed};

/// The part of the time left that a joint request may take. In the rest, each guard asks alone.
const SHARE: u32 = 2;

/// The entry of a waiting lease. Dropping it removes the lease.
struct Entry<'a> {
    client: &'a Client,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.client.together().remove(self.id);
    }
}

impl Client {
    /// Waits until a lease is due, and renews it together with others. Returns earlier if another
    /// guard's request renews it.
    pub(crate) async fn renew_together(&self, renewal: Renewal) -> Renewed {
        let (due, given_up) = (renewal.due, renewal.given_up);
        let (reply, mut renewed) = oneshot::channel();
        let id = self.together().enter(Due { renewal, reply });
        let _entry = Entry { client: self, id };
        tokio::select! {
            biased;
            renewed = &mut renewed => return renewed.unwrap_or(Renewed::Alone),
            () = due.reached() => {}
        }
        let taken = self.together().take(id);
        match taken.len() {
            0 => {}
            1 => return Renewed::Alone,
            _ => drop(tokio::spawn(self.clone().extend_many(taken))),
        }
        tokio::select! {
            renewed = renewed => renewed.unwrap_or(Renewed::Alone),
            () = given_up.reached() => Renewed::Alone,
        }
    }

    /// Extends leases by joint requests until each is decided. A guard whose lease was not decided
    /// in time finds its reply dropped.
    async fn extend_many(self, mut leases: Vec<Due>) {
        let Some(given_up) = leases.iter().map(|due| due.renewal.given_up).min() else { return };
        let left = given_up.left();
        let until = Moment::now() + left / SHARE;
        let mut route = self.route();
        let mut backoff = Backoff::default();
        loop {
            // Guards that were released meanwhile.
            leases.retain(|due| !due.reply.is_closed());
            let Some(first) = leases.first() else { return };
            let ttl = first.renewal.ttl;
            let refs = leases.iter().map(|due| due.renewal.lease.clone()).collect();
            let body = ExtendManyBody { leases: refs, ttl_ms: Some(millis(ttl)) };
            let call = Call::new(Method::PATCH, "locks").body(&body);
            let one_try = time_of_a_try(left);
            let answer = tokio::select! {
                answer = self.round::<ExtendManyResults>(&call, until, one_try, &mut route) => answer,
                () = all_closed(&mut leases) => return,
                // The request's timer stands still while the machine sleeps.
                () = until.reached() => return,
            };
            let retry_after = match answer {
                Ok((Some(answer), sent)) if answer.results.len() == leases.len() => {
                    let mut retry_after = Duration::ZERO;
                    let mut undecided = Vec::new();
                    for (due, result) in leases.into_iter().zip(answer.results) {
                        match decided(&due.renewal, result, sent) {
                            Ok(renewed) => drop(due.reply.send(renewed)),
                            Err(after) => {
                                retry_after = retry_after.max(after);
                                undecided.push(due);
                            }
                        }
                    }
                    leases = undecided;
                    // The next gateway may reach more masters.
                    route.at = (route.at + 1) % self.gateways() as usize;
                    retry_after
                }
                Ok(_) => return,
                Err(NoAnswer::Refused(problem)) => {
                    if matches!(problem.status, 404 | 405) {
                        self.together().stop();
                    }
                    return;
                }
                Err(NoAnswer::Round(round)) => round.retry_after,
            };
            let pause = backoff.next(retry_after);
            if leases.is_empty() || pause + SHORTEST_TRY >= until.left() {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// The result for one lease, or how long to wait before the lease is sent again.
fn decided(renewal: &Renewal, result: ExtendResult, sent: Moment) -> Result<Renewed, Duration> {
    let ExtendResult {
        name,
        status,
        code,
        detail,
        holder,
        retry_after_ms,
        validity_ms,
        waiters,
        elapsed_ms,
    } = result;
    if name != renewal.lease.name {
        return Ok(Renewed::Alone);
    }
    if let (200, Some(validity_ms)) = (status, validity_ms) {
        let deadline = deadline_of(validity_ms, elapsed_ms, sent, renewal.ttl);
        return Ok(Renewed::Extended(sent, deadline, waiters));
    }
    let problem = Problem {
        status,
        code: code.unwrap_or_default(),
        detail: detail.unwrap_or_default(),
        holder,
        ..Problem::default()
    };
    match status {
        _ if is_loss(&problem) => Ok(Renewed::Lost(problem.into())),
        408 | 429 | 500 | 502..=504 => Err(Duration::from_millis(retry_after_ms.unwrap_or(0))),
        _ => Ok(Renewed::Alone),
    }
}

/// Waits until the guards of all leases are gone.
async fn all_closed(leases: &mut [Due]) {
    for due in leases {
        due.reply.closed().await;
    }
}

#[cfg(test)]
mod tests {
    use redlock_api::LeaseRef;

    use super::*;
    use crate::error::LossReason;

    #[test]
    fn each_result_counts_as_the_answer_to_its_own_request() {
        let second = Duration::from_secs(1);
        let now = Moment::now();
        let lease = LeaseRef { name: "a".into(), token: "1.1".into() };
        let ttl = second * 30;
        let renewal = Renewal { lease, ttl, interval: second, due: now, given_up: now };
        let result = |status, code: &str| ExtendResult {
            name: "a".into(),
            status,
            code: Some(code.into()),
            detail: Some("why".into()),
            holder: Some("bob".into()),
            retry_after_ms: Some(7),
            validity_ms: None,
            waiters: None,
            elapsed_ms: 5_000,
        };
        let sent = now - second * 7;
        let extended = ExtendResult { validity_ms: Some(29_000), ..result(200, "") };
        let Ok(Renewed::Extended(at, deadline, _)) = decided(&renewal, extended.clone(), sent)
        else {
            panic!("it was extended")
        };
        assert_eq!((at, deadline.since(sent)), (sent, second * 34));
        let taken = decided(&renewal, result(409, "not_holder"), sent);
        let Ok(Renewed::Lost(LossReason::Taken { holder })) = taken else { panic!("it is lost") };
        assert_eq!(holder.as_deref(), Some("bob"));
        for code in ["lock_not_found", "max_hold_reached"] {
            let lost = decided(&renewal, result(404, code), sent);
            assert!(matches!(lost, Ok(Renewed::Lost(_))), "{code}");
        }
        for status in [429, 500, 503] {
            let unknown = decided(&renewal, result(status, "new"), sent);
            assert!(unknown.is_err_and(|after| after == Duration::from_millis(7)), "{status}");
        }
        let other = ExtendResult { name: "b".into(), ..extended };
        for refused in [result(403, "forbidden"), result(404, "not_found"), result(200, ""), other]
        {
            assert!(matches!(decided(&renewal, refused, sent), Ok(Renewed::Alone)));
        }
    }
}

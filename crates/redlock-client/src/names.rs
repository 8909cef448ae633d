//! The locks of one grant: one lock, or a set that is acquired all together or not at all.

use std::time::Duration;

use redlock_api::headers::LOCK_TOKEN;
use redlock_api::{ExtendManyBody, ExtendManyResults, ExtendResult, Lease, LeaseRef, Problem};
use reqwest::Method;
use serde_json::{Value, json};

use crate::client::{deadline_of, extension, is_loss, millis};
use crate::clock::Moment;
use crate::error::{Error, LossReason};
use crate::http::{Call, encoded};

/// The names of the locks of one grant, at least one.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// All names, for messages. No name has a comma.
    text: String,
    all: Vec<String>,
}

/// The answer to an extension of all locks of a grant.
pub(crate) enum Extension {
    /// All were extended: the earliest deadline, and how many wait for any of the locks.
    Extended(Moment, Option<u64>),
    /// One of the locks is lost, and the grant with it.
    Lost(LossReason),
    /// Some were not decided. The earlier deadline stands.
    Undecided(String),
}

impl Names {
    pub(crate) fn new(first: String) -> Self {
        Self { text: first.clone(), all: vec![first] }
    }

    pub(crate) fn and(mut self, name: String) -> Self {
        self.text = format!("{},{name}", self.text);
        self.all.push(name);
        self
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn is_set(&self) -> bool {
        self.all.len() > 1
    }

    /// A request to acquire, without a body.
    pub(crate) fn acquisition(&self) -> Result<Call, Error> {
        match self.all.as_slice() {
            [name] => Call::of_lock(Method::POST, name),
            _ => Ok(self.of_set(Method::POST, "locks".into())),
        }
    }

    /// The body of that request.
    pub(crate) fn with_names(&self, body: impl serde::Serialize) -> Value {
        let mut body = json!(body);
        if let (true, Some(fields)) = (self.is_set(), body.as_object_mut()) {
            fields.insert("names".into(), json!(self.all));
        }
        body
    }

    /// A request to extend all of them.
    pub(crate) fn extension(&self, token: &str, ttl: Duration) -> Result<Call, Error> {
        if let [name] = self.all.as_slice() {
            return extension(name, token, ttl);
        }
        let lease = |name: &String| LeaseRef { name: name.clone(), token: token.to_owned() };
        let leases = self.all.iter().map(lease).collect();
        let body = ExtendManyBody { leases, ttl_ms: Some(millis(ttl)) };
        Ok(self.of_set(Method::PATCH, "locks".into()).body(&body))
    }

    /// Reads the answer to an extension that was sent at `sent`.
    pub(crate) fn extended(&self, answer: Value, sent: Moment, ttl: Duration) -> Extension {
        let malformed = || Extension::Undecided("PATCH was answered with another body".into());
        if !self.is_set() {
            let Ok(lease) = serde_json::from_value::<Lease>(answer) else { return malformed() };
            let deadline = deadline_of(lease.validity_ms, lease.elapsed_ms, sent, ttl);
            return Extension::Extended(deadline, lease.waiters);
        }
        let Ok(answer) = serde_json::from_value::<ExtendManyResults>(answer) else {
            return malformed();
        };
        if answer.results.len() != self.all.len() {
            return malformed();
        }
        let mut first: Option<Moment> = None;
        let (mut waiters, mut undecided) = (0, None);
        for result in answer.results {
            let ExtendResult { name, status, code, detail, holder, .. } = result;
            if let (200, Some(validity_ms)) = (status, result.validity_ms) {
                let deadline = deadline_of(validity_ms, result.elapsed_ms, sent, ttl);
                first = Some(first.map_or(deadline, |first| first.min(deadline)));
                waiters += result.waiters.unwrap_or(0);
                continue;
            }
            let (code, detail) = (code.unwrap_or_default(), detail.unwrap_or_default());
            let detail = format!("{name}: {detail}");
            let problem = Problem { status, code, detail, holder, ..Problem::default() };
            if is_loss(&problem) {
                return Extension::Lost(problem.into());
            }
            undecided = Some(problem.detail);
        }
        match (undecided, first) {
            (None, Some(deadline)) => Extension::Extended(deadline, Some(waiters)),
            (undecided, _) => Extension::Undecided(undecided.unwrap_or_default()),
        }
    }

    /// A request to release all of them by their token.
    pub(crate) fn release(&self, token: &str) -> Result<Call, Error> {
        self.release_without_token()?.secret(&LOCK_TOKEN, token)
    }

    /// A request to release all of them without a token. The caller adds the idempotency key.
    pub(crate) fn release_without_token(&self) -> Result<Call, Error> {
        if let [name] = self.all.as_slice() {
            return Call::of_lock(Method::DELETE, name);
        }
        let pairs: Vec<_> = self.all.iter().map(|name| format!("name={}", encoded(name))).collect();
        Ok(self.of_set(Method::DELETE, format!("locks?{}", pairs.join("&"))))
    }

    fn of_set(&self, method: Method, path: String) -> Call {
        Call::new(method, path).about(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn answer(results: &[(u16, &str)]) -> Value {
        let result = |(at, (status, code)): (usize, &(u16, &str))| {
            let validity_ms = (*status == 200).then(|| 20_000 + 1_000 * at);
            json!({ "name": format!("n{at}"), "status": status, "code": code, "elapsed_ms": 0,
                    "validity_ms": validity_ms, "detail": "why", "waiters": 2 })
        };
        json!({ "results": results.iter().enumerate().map(result).collect::<Vec<_>>() })
    }

    #[test]
    fn a_set_is_held_until_its_first_lock_ends() {
        let names = Names::new("n0".into()).and("n1".into());
        let sent = Moment::now();
        let read = |results: &[(u16, &'static str)]| names.extended(answer(results), sent, TTL);
        let Extension::Extended(deadline, waiters) = read(&[(200, ""), (200, "")]) else {
            panic!("both were extended")
        };
        assert_eq!(waiters, Some(4));
        assert!(deadline <= sent + Duration::from_secs(20));
        for code in ["lock_not_found", "not_holder", "max_hold_reached"] {
            let lost = read(&[(503, "outcome_unknown"), (404, code)]);
            assert!(matches!(lost, Extension::Lost(_)), "{code}");
        }
        for undecided in [&[(200, ""), (503, "outcome_unknown")][..], &[(200, "")], &[]] {
            assert!(matches!(read(undecided), Extension::Undecided(_)));
        }
        assert!(matches!(names.extended(json!({}), sent, TTL), Extension::Undecided(_)));
    }

    #[test]
    fn names_are_encoded_in_a_query() {
        let names = Names::new("a/b".into()).and("c+d e".into());
        let call = names.release_without_token().expect("a call");
        assert_eq!(call.path, "locks?name=a%2Fb&name=c+d%20e");
        assert_eq!(names.text(), "a/b,c+d e");
        assert_eq!(names.with_names(json!({}))["names"], json!(["a/b", "c+d e"]));
    }
}

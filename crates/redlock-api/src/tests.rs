//! What a reader accepts from a newer gateway, and what a request keeps.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

fn read<T: DeserializeOwned>(answer: Value) -> T {
    serde_json::from_value(answer).expect("a newer gateway's answer is readable")
}

fn written(shape: &impl Serialize) -> Value {
    serde_json::to_value(shape).expect("a shape is JSON")
}

#[test]
fn unknown_fields_of_answers_are_ignored() {
    let lease: Lease = read(json!({
        "name": "a", "token": "t", "fencing_token": 1, "ttl_ms": 2, "validity_ms": 3, "elapsed_ms": 4,
        "expires_at": "2025-11-21T11:39:54.822Z", "nodes_granted": 3, "nodes_total": 5, "newer": {}
    }));
    assert_eq!((lease.validity_ms, lease.owner), (3, None));
    let list: LockList = read(json!({
        "locks": [{ "name": "a", "state": "held", "newer": 1, "nodes": [{ "node": "n", "state": "newer", "newer": 1 }] }],
        "newer": 1
    }));
    assert_eq!((list.locks[0].state, list.next_cursor), (LockState::Held, None));
    let health: Health = read(json!({
        "status": "newer", "newer": 1,
        "nodes": [{ "node": "n", "state": "newer", "since": "s", "restarts": 0, "evicted_keys": 0, "newer": 1 }]
    }));
    assert_eq!(health.status, "newer");
}

#[test]
fn an_unknown_code_stays_a_text() {
    let problem = json!({ "type": "t", "title": "t", "status": 409, "code": "newer", "detail": "d", "newer": 1 });
    let problem: Problem = read(problem);
    assert_eq!((problem.code.as_str(), problem.known_code()), ("newer", None));
    assert_eq!(problem.to_string(), "newer (409): d");
}

#[test]
fn every_code_is_known_by_its_text() {
    for code in ProblemCode::ALL {
        let problem = Problem { code: code.to_string(), ..Problem::default() };
        assert_eq!(problem.known_code(), Some(*code));
    }
}

#[test]
fn an_unknown_state_reads_as_unknown() {
    assert_eq!(read::<LockState>(json!("newer")), LockState::Unknown);
    for state in [LockState::Held, LockState::Free, LockState::Unknown] {
        assert_eq!(written(&state), state.as_str());
        assert_eq!(read::<LockState>(json!(state.as_str())), state);
    }
}

#[test]
fn a_request_keeps_null_and_refuses_unknown_fields() {
    let body: AcquireBody = read(json!({ "ttl_ms": null }));
    assert_eq!((body.ttl_ms, body.wait_ms), (Some(Value::Null), None));
    let error = serde_json::from_value::<AcquireBody>(json!({ "ttl": 5000 })).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("`ttl`") && error.contains("`ttl_ms`"), "{error}");
}

#[test]
fn absent_fields_are_omitted() {
    assert_eq!(written(&AcquireBody::default()), json!({}));
    assert_eq!(
        written(&Problem::default()),
        json!({ "type": "", "title": "", "status": 0, "code": "", "detail": "" })
    );
}

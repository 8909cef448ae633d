//! Callers of the Redis module. Clients with an ACL user may call it, within the keys of that user.
//! The module refuses every other caller, because it cannot know which keys that caller may use.

use std::sync::Arc;

use redlock_core::node::codec::{Header, pack_call, unpack_answer};
use redlock_core::node::{Op, Vote};

use crate::support::cluster::clock_shim;
use crate::support::gateway::Scratch;
use crate::support::harness::{RedisOptions, RedisServer};
use crate::support::nodes::{LONG_MS, Lock, node_settings, now};
use crate::support::resp::Resp;

const MARKER_KEY: &str = "{lock:}:marker";
const MARKER: &str = "1 a-marker";
/// The rights of a user that may run the command, but only with these keys.
const MINE: [&str; 4] = ["on", "+@all", "~{lock:}:*", "~*lock:mine*"];

/// A server with the module, and with a second module that calls the first one.
fn server() -> (RedisServer, Scratch) {
    let caller = clock_shim("caller_module.c");
    let args = vec!["--loadmodule".into(), caller.path().to_owned()];
    let server = RedisServer::start_with(RedisOptions {
        native: Some(true),
        args,
        ..RedisOptions::default()
    });
    server.cmd(&["SET", MARKER_KEY, MARKER]);
    (server, caller)
}

fn run_id(server: &RedisServer) -> String {
    let info = server.cmd(&["INFO", "server"]).text();
    info.lines().find_map(|line| line.strip_prefix("run_id:")).expect("a run_id").to_owned()
}

fn call(op: Op) -> Vec<u8> {
    let header =
        Header::new(MARKER_KEY, MARKER, "{lock:}:hints", "{lock:}:number:1", &node_settings());
    pack_call(&header, 0, [Arc::new(op)].iter())
}

fn acquire(name: &str) -> Vec<u8> {
    call(Lock::new(name).acquire(1, now(), LONG_MS))
}

/// The vote in the answer to a call with one operation.
fn vote(answer: Result<Resp, String>) -> Vote {
    match answer {
        Ok(Resp::Bytes(bytes)) => {
            unpack_answer(1, bytes.into()).expect("an answer").votes.remove(0)
        }
        other => panic!("{other:?}"),
    }
}

fn is_refused(answer: Result<Resp, String>, word: &str) {
    assert!(matches!(&answer, Err(error) if error.starts_with(word)), "{answer:?}");
}

fn is_forbidden(answer: Result<Resp, String>) {
    let vote = vote(answer);
    assert!(
        matches!(&vote, Vote::Failed(failure) if failure.detail.contains("NOPERM")),
        "{vote:?}"
    );
}

#[test]
fn a_user_missing_from_the_acl_is_refused() {
    let (server, _caller) = server();
    let run_id = run_id(&server);
    let ask = |call: &[u8]| server.answer(&[b"REDLOCK.CALL", run_id.as_bytes(), call]);
    assert_eq!(vote(ask(&acquire("theirs"))), Vote::Granted);
    server.cmd(&[&["CALLER.BECOME", "stranger"][..], &MINE[..]].concat());
    assert_eq!(server.answer(&["ACL", "WHOAMI"]), Ok(Resp::Bytes(b"stranger".into())));
    is_refused(server.answer(&["GET", "lock:theirs"]), "NOPERM");
    for call in [call(Lock::new("theirs").inspect()), acquire("others"), acquire("mine")] {
        is_refused(ask(&call), "NOPERM redlock:");
    }
    assert_eq!(server.cmd(&["EXISTS", "lock:mine"]), Resp::Integer(0));
}

#[test]
fn a_call_without_a_user_is_refused_and_ends_no_server() {
    let (server, _caller) = server();
    let run_id = run_id(&server);
    // Once without a user, and once as the client's user.
    for flags in ["-", "C"] {
        let answer =
            server.answer(&[b"CALLER.PASS", flags.as_bytes(), run_id.as_bytes(), &acquire("job")]);
        is_refused(answer, "NOPERM redlock:");
    }
    assert_eq!(server.cmd(&["EXISTS", "lock:job"]), Resp::Integer(0));
}

#[test]
fn a_script_cannot_run_the_command() {
    let (server, _caller) = server();
    let script = "return redis.call('REDLOCK.CALL', ARGV[1], ARGV[2])";
    let run_id = run_id(&server);
    let answer =
        server.answer(&[b"EVAL", script.as_bytes(), b"0", run_id.as_bytes(), &acquire("job")]);
    assert!(
        matches!(&answer, Err(error) if error.contains("not allowed from script")),
        "{answer:?}"
    );
    assert_eq!(server.cmd(&["EXISTS", "lock:job"]), Resp::Integer(0));
}

#[test]
fn a_transaction_runs_the_command_as_its_client() {
    let (server, _caller) = server();
    let run_id = run_id(&server);
    server.cmd(&["MULTI"]);
    server.cmd(&[b"REDLOCK.CALL", run_id.as_bytes(), &acquire("job")]);
    let Resp::List(answers) = server.cmd(&["EXEC"]) else { panic!("a list") };
    assert_eq!(vote(Ok(answers[0].clone())), Vote::Granted);
}

/// The keys of each selector count, whatever commands that selector allows. When the module asks
/// the server whether a user may use a key, the server looks only at keys.
#[test]
fn keys_of_all_selectors_count_and_only_for_reading_and_writing() {
    let (server, _caller) = server();
    let run_id = run_id(&server);
    let ask = |name: &str| server.answer(&[b"REDLOCK.CALL", run_id.as_bytes(), &acquire(name)]);
    let rules = [&["ACL", "SETUSER", "parts", ">pw"][..], &MINE[..]];
    let selectors = ["(+get ~*lock:also*)", "(+get %R~*lock:read*)", "(+set %W~*lock:read*)"];
    server.cmd(&[rules.concat(), selectors.to_vec()].concat());
    server.cmd(&["AUTH", "parts", "pw"]);
    assert_eq!(vote(ask("mine")), Vote::Granted);
    assert_eq!(vote(ask("also")), Vote::Granted);
    is_forbidden(ask("read"));
    is_forbidden(ask("none"));
}

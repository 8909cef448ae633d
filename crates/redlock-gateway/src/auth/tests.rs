//! Keys, callers and their permissions.

#![cfg(test)]

use std::time::{Duration, Instant, SystemTime};

use redlock_core::{LockName, Ttl};

use super::*;
use crate::config::Limits;
use crate::overload::clients::Terms;

fn name(text: &str) -> LockName {
    text.parse::<LockName>().unwrap()
}

/// A key of this name, and a keys file with its entry.
fn key(of: &str, rest: &str) -> (String, String) {
    let secret = Secret::new(of, &redlock_core::clock::OsEntropy);
    let entry = format!("[[key]]\nname = {of:?}\nhashes = [{:?}]\n{rest}\n", secret.hash_text());
    (secret.expose().to_owned(), entry)
}

fn later() -> SystemTime {
    SystemTime::now() + Duration::from_secs(60)
}

const ALL: &str = "allow = [{ verbs = ['acquire', 'release'], names = ['deploy/*', 'exact'] }]";

#[test]
fn a_key_opens_what_its_rules_name_and_nothing_else() {
    let (text, entry) = key("ci", ALL);
    let authenticator = Authenticator::new(Keys::parse(&entry).unwrap());
    let caller = authenticator.identify(Some(Credential::Key(&text))).unwrap();
    assert_eq!((caller.name(), caller.principal()), ("ci", Some("ci")));
    for (verb, lock, allowed) in [
        (Verb::Acquire, "deploy/x", true),
        (Verb::Release, "exact", true),
        (Verb::Acquire, "exact2", false),
        (Verb::Acquire, "deploy", false),
        (Verb::Extend, "deploy/x", false),
        (Verb::Force, "deploy/x", false),
    ] {
        assert_eq!(caller.may(verb, &name(lock)), allowed, "{verb:?} {lock}");
    }
    assert!(!caller.may_somewhere(Verb::Metrics) && caller.may_somewhere(Verb::Acquire));
}

#[test]
fn refusals_differ_only_for_callers_that_had_the_key() {
    let (old, expired) = key("old", &format!("expires = 2020-01-01T00:00:00Z\n{ALL}"));
    let (right, entry) = key("ci", ALL);
    let (wrong, _) = key("ci", ALL);
    let (absent, _) = key("nobody", ALL);
    let authenticator = Authenticator::new(Keys::parse(&(expired + &entry)).unwrap());
    let refused = |shown| authenticator.identify(shown).err();
    assert_eq!(refused(None), Some(AuthError::Missing));
    for text in
        [wrong.as_str(), absent.as_str(), "", "rlk.ci.", "hunter2", &right[..right.len() - 1]]
    {
        assert_eq!(refused(Some(Credential::Key(text))), Some(AuthError::Unknown), "{text}");
    }
    assert_eq!(refused(Some(Credential::Key(&old))), Some(AuthError::Expired));
    assert_eq!(refused(Some(Credential::NamedKey("ci", &right))), None);
    assert_eq!(refused(Some(Credential::NamedKey("old", &right))), Some(AuthError::Unknown));
    assert_eq!(refused(Some(Credential::Certificate("CN=ci", later()))), Some(AuthError::Unknown));
}

#[test]
fn both_hashes_count_while_a_key_is_replaced() {
    let one = Secret::new("ci", &redlock_core::clock::OsEntropy);
    let two = Secret::new("ci", &redlock_core::clock::OsEntropy);
    let text = format!(
        "[[key]]\nname = 'ci'\nhashes = [{:?}, {:?}]\n{ALL}",
        one.hash_text(),
        two.hash_text()
    );
    let authenticator = Authenticator::new(Keys::parse(&text).unwrap());
    assert!(
        [one, two]
            .iter()
            .all(|secret| authenticator.identify(Some(Credential::Key(secret.expose()))).is_ok())
    );
}

#[test]
fn a_certificate_is_a_principal_as_a_key_is() {
    let text =
        format!("[[key]]\nname = 'ci'\ncertificate = 'CN=ci,O=Example'\nmax_ttl = '1s'\n{ALL}");
    let authenticator = Authenticator::new(Keys::parse(&text).unwrap());
    let caller =
        authenticator.identify(Some(Credential::Certificate("CN=ci,O=Example", later()))).unwrap();
    assert_eq!(caller.principal(), Some("ci"));
    let ended = Credential::Certificate("CN=ci,O=Example", SystemTime::now());
    assert_eq!(authenticator.identify(Some(ended)).err(), Some(AuthError::Expired));
    assert!(authenticator.identify(Some(Credential::Certificate("CN=ci", later()))).is_err());
}

#[test]
fn limits_of_a_key_only_ever_lower_those_of_the_gateway() {
    let millis = |millis| Ttl::from_millis(millis).unwrap();
    let day = Duration::from_secs(86_400);
    let all = Limits {
        default_ttl: millis(30_000),
        max_ttl: millis(300_000),
        max_wait: day,
        max_hold: day,
    };
    for (own, default, max, hold) in [
        ("'10s'", 10_000, 10_000, 3_600),
        ("'1m'", 30_000, 60_000, 3_600),
        ("'1h'", 30_000, 300_000, 3_600),
    ] {
        let (text, entry) = key("ci", &format!("max_ttl = {own}\nmax_hold = '1h'\n{ALL}"));
        let authenticator = Authenticator::new(Keys::parse(&entry).unwrap());
        let limits = authenticator.identify(Some(Credential::Key(&text))).unwrap().limits(all);
        assert_eq!((limits.default_ttl, limits.max_ttl), (millis(default), millis(max)), "{own}");
        assert_eq!(limits.max_hold, Duration::from_secs(hold));
    }
}

#[test]
fn a_new_file_keeps_the_quota_of_a_key() {
    let (text, entry) = key("ci", ALL);
    let authenticator = Authenticator::new(Keys::parse(&entry).unwrap());
    let client =
        || authenticator.identify(Some(Credential::Key(&text))).unwrap().client().unwrap().clone();
    let one =
        Terms { limit: Some(400), watermark_life: Duration::from_secs(3_600), ..Terms::default() };
    let takes = |name: &str| {
        let until = Instant::now() + Duration::from_secs(3_600);
        client().reserve(name, 0, until, one.clone()).map(|reserved| reserved.granted(until))
    };
    assert!(takes("a").is_ok() && takes("b").is_err());
    authenticator.replace(Keys::parse(&entry).unwrap());
    assert!(takes("b").is_err());
    client().released("a", &one);
    assert!(takes("b").is_err(), "its watermark stays for a while");
}

#[test]
fn a_new_file_does_not_refill_the_rate_of_a_key() {
    let (text, entry) = key("ci", &format!("rate = 1\nburst = 2000\n{ALL}"));
    let authenticator = Authenticator::new(Keys::parse(&entry).unwrap());
    let asks = || authenticator.identify(Some(Credential::Key(&text))).unwrap().check_rate();
    // The requests that pass until one is refused. On a machine that stands still, each second adds
    // one request.
    let pass = || {
        let passed = (0..100_000).find_map(|passed| {
            let pause = asks().err().filter(|pause| !pause.is_zero());
            pause.map(|pause| (passed, pause))
        });
        let (passed, pause) = passed.expect("a refusal");
        assert!(pause <= Duration::from_secs(1), "{pause:?}");
        passed
    };
    assert!(pass() >= 2_000);
    authenticator.replace(Keys::parse(&entry).unwrap());
    assert!(pass() < 1_000, "the new file refills nothing");
    let larger = entry.replace("burst = 2000", "burst = 4000");
    authenticator.replace(Keys::parse(&larger).unwrap());
    assert!(pass() >= 4_000, "another limit begins anew");
}

#[test]
fn without_keys_force_needs_loopback_and_the_rest_is_allowed() {
    assert!(Authenticator::open(true).identify(None).unwrap().may(Verb::Force, &name("x")));
    let caller = Authenticator::open(false).identify(None).unwrap();
    assert!(caller.may(Verb::Release, &name("x")) && !caller.may(Verb::Force, &name("x")));
    assert_eq!(
        (caller.name(), caller.principal(), caller.check_rate()),
        ("anonymous", None, Ok(()))
    );
}

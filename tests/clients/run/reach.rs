//! Whether `redlock` reaches a gateway: nobody listens, a gateway hangs, and certificates.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::{output, redlock};
use crate::support::certificates::Authority;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{DeadPort, free_port};

/// Commands for gateways, none of which listens. Returns how long the longest one took.
async fn commands_without_a_listener() -> Duration {
    let gateway = Launch::embedded().ready().await;
    let dead = [DeadPort::new(), DeadPort::new()];
    let urls = dead.each_ref().map(|dead| format!("http://127.0.0.1:{}", dead.port()));
    let urls = ["--url", &urls[0], "--url", &urls[1]];
    let mut longest = Duration::ZERO;
    for args in [
        &["run", "a", "--", "true"][..],
        &["run", "a", "--wait", "0", "--", "true"],
        &["acquire", "a"],
        &["extend", "a", "--token", "t"],
        &["release", "a", "--token", "t"],
        &["status", "a"],
        &["list"],
        &["watch", "a"],
        &["force-release", "a"],
        &["nodes"],
    ] {
        let begin = Instant::now();
        let (code, _, err) = output(&gateway, &[&urls[..], args].concat()).await;
        longest = longest.max(begin.elapsed());
        assert_eq!(code, Some(69), "{args:?}");
        let are_named = urls.iter().skip(1).step_by(2).all(|url| err.contains(url));
        assert!(are_named && err.contains("no gateway can be reached"), "{args:?}: {err}");
    }
    let alive = format!("http://{}", gateway.address());
    let some_alive = [&urls[..], &["--url", &alive, "run", "a", "--", "true"]].concat();
    assert_eq!(output(&gateway, &some_alive).await, (Some(0), String::new(), String::new()));
    longest
}

#[tokio::test]
async fn nothing_listening_is_reported() {
    commands_without_a_listener().await;
}

#[tokio::test]
async fn wait_asks_again_until_a_gateway_listens() {
    let address = format!("127.0.0.1:{}", free_port());
    let launch = Launch::bare(&["--listen", &address]);
    let away = Launch::embedded().ready().await;
    let url = format!("http://{address}");
    let mut run =
        redlock(&away, &["--url", &url, "run", "a", "--wait", "forever", "--", "echo", "hi"]);
    let mut run = run.spawn().unwrap();
    let told = super::line(&mut run).await;
    assert!(
        told.starts_with("redlock: a: no gateway can be reached, asking again: http://"),
        "{told}"
    );
    let _gateway = launch.start().await;
    let ended = super::ended(run).await;
    assert!(ended.status.success() && ended.stdout == b"hi\n", "{ended:?}");
}

#[tokio::test]
async fn self_signed_certificate_is_trusted_as_given() {
    let folder = Authority::new();
    let ours = folder.self_signed("ours", "DNS:localhost", 2060);
    let theirs = folder.self_signed("theirs", "DNS:localhost", 2060);
    let expired = folder.self_signed("expired", "DNS:localhost", 2021);
    let over = async |own: &crate::support::certificates::Issued| {
        let launch = Launch::embedded().flag("--tls-cert", &own.cert).flag("--tls-key", &own.key);
        launch.start().await
    };
    let gateway = over(&ours).await;
    let stale = over(&expired).await;
    let ask = async |gateway: &Gateway, host: &str, ca: &str| {
        let url = format!("https://{host}:{}", gateway.address().port());
        let (code, out, err) = output(gateway, &["--url", &url, "--ca", ca, "status", "a"]).await;
        (code, out + &err)
    };
    let (code, shown) = ask(&gateway, "localhost", &ours.cert).await;
    assert_eq!((code, &*shown), (Some(0), "a: free\n"));
    for (gateway, host, ca, what) in [
        (&gateway, "127.0.0.1", &ours, "not valid for name"),
        (&gateway, "localhost", &theirs, "certificate"),
        (&stale, "localhost", &expired, "Expired"),
    ] {
        let (code, shown) = ask(gateway, host, &ca.cert).await;
        assert!(code == Some(69) && shown.contains(what), "{what}: {code:?} {shown}");
    }
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    /// Well below the 5 s for which a failed request is repeated.
    const AT_ONCE: Duration = Duration::from_secs(3);

    #[tokio::test]
    async fn nothing_listening_is_reported_at_once() {
        measured("commands without a listener", async || {
            let longest = commands_without_a_listener().await;
            if longest < AT_ONCE { Ok(()) } else { Err(format!("one took {longest:?}")) }
        })
        .await;
    }

    /// One try of 5 s, and 2 s for the release of what may have been granted.
    #[tokio::test]
    async fn hung_gateway_is_given_up_soon_after_the_wait() {
        let gateway = Launch::embedded().ready().await;
        gateway.signal(Signal::STOP);
        let run = async |wait: &'static str| {
            let begin = Instant::now();
            let args = ["run", "a", "--wait", wait, "--", "true"];
            let (code, _, err) = output(&gateway, &args).await;
            let took = begin.elapsed();
            assert!(code == Some(69) && err.contains("did not answer"), "{code:?} {err}");
            took
        };
        measured("the end of a wait for a hung gateway", async || {
            let took = futures_util::future::join_all(["0", "1s"].map(run)).await;
            let is_soon = took.iter().all(|took| *took < Duration::from_secs(10));
            if is_soon { Ok(()) } else { Err(format!("they took {took:?}")) }
        })
        .await;
        gateway.signal(Signal::CONT);
    }

    /// Runs a command with a timeout of a second. It must end with this exit code, and in time.
    async fn bounded(
        gateway: &Gateway,
        args: &[&str],
        code: i32,
        says: &str,
    ) -> Result<(), String> {
        let begin = Instant::now();
        let (ended, _, err) = output(gateway, &[&["--timeout", "1s"], args].concat()).await;
        let took = begin.elapsed();
        // A hung acquire may have been granted. So its release takes up to 2 s more.
        let is_acquire = matches!(args[0], "run" | "acquire");
        let limit = if is_acquire { AT_ONCE * 2 } else { AT_ONCE * 3 / 2 };
        let is_good = ended == Some(code) && err.contains(says) && took < limit;
        if is_good { Ok(()) } else { Err(format!("{args:?}: {ended:?} after {took:?}: {err}")) }
    }

    #[tokio::test]
    async fn timeout_bounds_a_request_in_all() {
        let gateway = Launch::embedded().ready().await;
        measured("commands with a timeout", async || {
            // This lock is held from one run to the next.
            gateway.post("held", json!({ "ttl_ms": 300_000 })).await;
            for args in [&["run", "held", "--", "true"][..], &["acquire", "held", "--wait", "1m"]] {
                bounded(&gateway, args, 75, "holds the lock").await?;
            }
            gateway.signal(Signal::STOP);
            let mut found = Ok(());
            for args in [
                &["run", "a", "--", "true"][..],
                &["acquire", "a", "--wait", "1m"],
                &["status", "a"],
                &["nodes"],
            ] {
                let is_bounded = bounded(&gateway, args, 69, "did not answer within").await;
                found = found.and(is_bounded);
            }
            gateway.signal(Signal::CONT);
            found
        })
        .await;
    }
}

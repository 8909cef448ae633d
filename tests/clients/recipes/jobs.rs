//! Recipes for shells, cron, systemd, and containers in Kubernetes.

use http::Method;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::process::Command;

use super::{Place, ended, is_here, run, yaml};
use crate::support::client::lock_path;
use crate::support::gateway::Gateway;
use crate::support::harness::eventually;
use crate::support::metrics::Samples;
use crate::support::waiters::waiting;

const SHELL: &str = "A shell script with curl only";

#[tokio::test]
async fn runs_of_a_curl_script_exclude_each_other_and_release() {
    let place = Place::new(&["nightly-report"]).await;
    let script = place.file("report.sh", &place.block(SHELL, "sh", 0));
    assert!(!place.block(SHELL, "sh", 0).contains("--json"), "curl before 7.82 has no --json");
    // A run waits for 20 s. On a busy machine that may not be enough.
    let served = async || {
        eventually("a run gets the lock", async || {
            let (code, output) = run(place.command(&["dash", &script])).await;
            assert!(matches!(code, Some(0 | 75)), "{output}");
            (code == Some(0)).then_some(())
        })
        .await;
    };
    futures_util::future::join_all((0..5).map(|_| served())).await;
    place.assert_one_at_a_time(5);
    place.assert_free("reports/nightly").await;
    place.file("code", "3");
    let (code, output) = run(place.command(&["dash", &script])).await;
    assert_eq!(code, Some(3), "the exit code is the work's: {output}");
    place.assert_free("reports/nightly").await;
    // A signal arrives during the work. First the work ends, and then the lock is released.
    std::fs::remove_file(place.path("code")).unwrap();
    place.hold();
    let shell = place.command(&["dash", &script]).spawn().unwrap();
    place.begun(7).await;
    assert_eq!(place.gateway.inspect("reports/nightly").await["state"], "held");
    kill_process(Pid::from_raw(shell.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    place.go();
    assert_eq!(ended(shell).await.0, Some(143));
    place.assert_free("reports/nightly").await;
    place.assert_one_at_a_time(7);
}

#[tokio::test]
async fn a_curl_script_distinguishes_a_held_lock_from_other_errors() {
    let place = Place::new(&["nightly-report"]).await;
    let script = place.block(SHELL, "sh", 0);
    assert!(!script.contains("$answer."), "the script uses a predictable file name: {script}");
    let code =
        async |script: &str| run(place.command(&["dash", &place.file("report.sh", script)])).await;
    let held = json!({ "owner": "alice", "ttl_ms": 300_000 });
    assert_eq!(place.gateway.post("reports/nightly", held).await.status, 201);
    let (held, output) = code(&script.replace("20000", "100")).await;
    assert!(held == Some(75) && output.contains("409"), "{output}");
    let (refused, output) = code(&script.replace("60000", "9000000000")).await;
    assert!(refused == Some(69) && output.contains("400"), "{output}");
    let (unanswered, output) =
        code(&script.replace(&place.gateway.address().to_string(), "127.0.0.1:1")).await;
    assert_eq!(unanswered, Some(69), "{output}");
    assert_eq!(place.count("begin"), 0);
}

/// The commands of a crontab. Each is started as cron would start it: only with the variables that
/// the table sets.
fn cron(place: &Place, table: &str) -> Vec<Vec<String>> {
    let is_setting =
        |line: &&str| line.split_once('=').is_some_and(|(name, _)| !name.contains([' ', '*']));
    let mut start: Vec<String> = ["env", "-i", "LOGNAME=reporter"].map(String::from).into();
    start.push(format!("HOME={}", place.path("")));
    start.extend(table.lines().filter(is_setting).map(str::to_owned));
    let shell = table.lines().find_map(|line| line.strip_prefix("SHELL=")).unwrap_or("/bin/sh");
    start.extend([shell.to_owned(), "-c".into()]);
    let jobs = table.lines().filter(|line| !is_setting(line) && !line.is_empty());
    jobs.map(|line| {
        let mut fields = line.splitn(6, ' ');
        let times: Vec<_> = fields.by_ref().take(5).collect();
        assert!(times.iter().all(|time| *time == "*" || time.parse::<u8>().is_ok()), "{line}");
        let command = fields.next().expect("a command").replace("\\%", "\0");
        assert!(!command.contains('%'), "cron would split the line here: {line}");
        [start.clone(), vec![command.replace('\0', "%")]].concat()
    })
    .collect()
}

#[tokio::test]
async fn a_crontab_runs_on_one_host_and_skips_without_error() {
    let place = Place::new(&["nightly-report", "daily-mail"]).await;
    let jobs = cron(&place, &place.block("Cron on several hosts", "crontab", 0));
    assert_eq!(jobs.len(), 2);
    let host = |job: usize| -> Command {
        place.command(&jobs[job].iter().map(String::as_str).collect::<Vec<_>>())
    };
    place.hold();
    let first = host(0).spawn().unwrap();
    place.begun(1).await;
    let (code, output) = run(host(0)).await;
    assert!(code == Some(0) && output.contains("holds the lock"), "{output}");
    place.go();
    assert_eq!(ended(first).await.0, Some(0));
    // A host whose clock is late skips its run, although the first run is over.
    let (code, output) = run(host(0)).await;
    assert!(code == Some(0) && output.contains("stays closed"), "{output}");
    place.assert_one_at_a_time(1);
    // If the work fails, its exit code stays a failure. That holds even for the exit code which
    // otherwise means that the lock is held.
    for code in [3, 75] {
        place.file("code", &code.to_string());
        let path = format!("{}?force=true", lock_path("cron/nightly-report"));
        assert_eq!(place.gateway.call(Method::DELETE, path).send().await.status, 204);
        assert_eq!(run(host(0)).await.0, Some(code));
    }
    place.assert_one_at_a_time(3);
    // Two hosts run one after the other. Only the first run does the work.
    for code in [75, 0] {
        assert_eq!(run(host(1)).await.0, Some(code));
    }
    place.assert_one_at_a_time(4);
}

/// The value of a setting in a systemd unit.
fn setting<'a>(unit: &'a str, name: &str) -> &'a str {
    let found = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {name}: {unit}"))
}

#[tokio::test]
async fn a_systemd_unit_is_valid_and_runs_once() {
    let place = Place::new(&["nightly-report"]).await;
    let heading = "A systemd timer on several hosts";
    let unit = place.block(heading, "ini", 0);
    let service = place.file("nightly-report.service", &unit);
    let timer = place.file("nightly-report.timer", &place.block(heading, "ini", 1));
    if is_here(&place, &["systemd-analyze", "--version"]).await {
        let (code, output) =
            run(place.command(&["systemd-analyze", "verify", &service, &timer])).await;
        assert!(code == Some(0) && !output.contains("nightly-report."), "{output}");
    }
    let start = || {
        let words: Vec<_> = setting(&unit, "ExecStart").split(' ').collect();
        let (name, value) = setting(&unit, "Environment").split_once('=').unwrap();
        let mut command = place.command(&words);
        command.env_clear().env("PATH", "/usr/bin:/bin").env(name, value);
        command
    };
    place.hold();
    let first = start().spawn().unwrap();
    place.begun(1).await;
    let (code, output) = run(start()).await;
    assert!(code == Some(0) && output.contains("holds the lock"), "{output}");
    // With KillMode=mixed, `systemctl stop` sends this signal.
    kill_process(Pid::from_raw(first.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    assert_eq!(ended(first).await.0, Some(143));
    place.assert_free("nightly-report").await;
    place.go();
    assert_eq!(run(start()).await.0, Some(0));
    assert_eq!((place.count("begin"), place.count("end")), (2, 1));
}

/// The command and the environment of the only container in a Kubernetes manifest.
async fn container(place: &Place, heading: &str, pod: &str) -> (Vec<String>, serde_json::Value) {
    let manifest = yaml(place, &place.block(heading, "yaml", 0)).await;
    let container =
        manifest.pointer(&format!("{pod}/spec/containers/0")).expect("a container").clone();
    let words = container["command"].as_array().expect("a command").iter();
    (words.map(|word| word.as_str().expect("text").to_owned()).collect(), container["env"].clone())
}

fn start(place: &Place, (words, env): &(Vec<String>, serde_json::Value)) -> Command {
    let mut command = place.command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    for set in env.as_array().expect("variables") {
        command.env(
            set["name"].as_str().expect("a name"),
            set["value"].as_str().unwrap_or("mailer-7"),
        );
    }
    command
}

#[tokio::test]
async fn commands_in_containers_exclude_each_other() {
    let place = Place::new(&["nightly-report", "mailer"]).await;
    let report = container(&place, "A Kubernetes CronJob", "/spec/jobTemplate/spec/template").await;
    let mailer = container(&place, "Leader election in Kubernetes", "/spec/template").await;
    place.hold();
    let first = start(&place, &report).spawn().unwrap();
    place.begun(1).await;
    assert_eq!(run(start(&place, &report)).await.0, Some(0), "the run is skipped");
    let mut leader = start(&place, &mailer).spawn().unwrap();
    place.begun(2).await;
    let candidate = start(&place, &mailer).spawn().unwrap();
    assert_eq!(place.gateway.inspect("leader/mailer").await["owner"], "mailer-7");
    let before = place.gateway.inspect("leader/mailer").await["fencing_token"].as_u64();
    // The leader's machine dies, and its work is killed. A forced release stands for the expiry of
    // the lock. Then the candidate leads.
    leader.start_kill().unwrap();
    leader.wait().await.unwrap();
    let path = format!("{}?force=true", lock_path("leader/mailer"));
    assert_eq!(place.gateway.call(Method::DELETE, path).send().await.status, 204);
    place.begun(3).await;
    let after = place.gateway.inspect("leader/mailer").await["fencing_token"].as_u64();
    assert!(after > before, "{after:?} {before:?}");
    let killed = place.log()[1][1].clone();
    eventually("the work of the dead leader is gone", async || {
        (!std::path::Path::new("/proc").join(&killed).exists()).then_some(())
    })
    .await;
    place.go();
    assert_eq!((ended(first).await.0, ended(candidate).await.0), (Some(0), Some(0)));
    assert_eq!(place.count("end"), 2, "processes of the killed leader: {:?}", place.log());
}

/// How many requests have found a lock held.
async fn found_held(gateway: &Gateway) -> u64 {
    let samples = Samples::of(gateway).await;
    let outcomes = samples.non_zero("redlock_operations_total", &["operation", "outcome"]);
    outcomes.get(&["acquire", "held"].map(String::from)[..]).copied().unwrap_or(0)
}

#[tokio::test]
async fn readers_and_writers_never_overlap() {
    let place = Place::new(&["reader", "writer"]).await;
    place.program("bin/rw", &place.block("Readers and a writer", "sh", 0));
    let rw = |mode: &str, work: &str| place.command(&["rw", mode, "doc", work]).spawn().unwrap();
    place.hold();
    let mut all: Vec<_> = (0..8).map(|_| rw("read", "reader")).collect();
    // All readers run side by side.
    place.begun(8).await;
    // The first request of a run waits for a second, and the others for 20 s. Between two requests,
    // a free lock goes to the next run in line. So each run has to be in its second request.
    let before = found_held(&place.gateway).await;
    let now_wait = async |count| {
        let what = format!("{count} wait");
        eventually(&what, async || {
            let are_second = found_held(&place.gateway).await >= before + count;
            (are_second && waiting(&place.gateway).await.0 == count).then_some(())
        })
        .await;
    };
    all.extend((0..3).map(|_| rw("write", "writer")));
    now_wait(3).await;
    // These come after the writers, so they wait although slots are free.
    all.extend((0..4).map(|_| rw("read", "reader")));
    now_wait(7).await;
    assert_eq!(place.count("begin"), 8);
    place.go();
    for child in all {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
    let log = place.log();
    let mut inside = Vec::new();
    assert_eq!(log.len(), 2 * 15, "{log:?}");
    for line in &log {
        let [word, process, who] = [&line[0], &line[1], &line[2]];
        if word == "begin" {
            inside.push((who, process));
        } else {
            inside.retain(|(_, other)| *other != process);
        }
        let writes = inside.iter().any(|(who, _)| *who == "writer");
        assert!(!writes || inside.len() == 1, "{inside:?} at once: {log:?}");
    }
    let begun: Vec<_> = log.iter().filter(|line| line[0] == "begin").map(|line| &line[2]).collect();
    let last_writer = begun.iter().rposition(|who| *who == "writer");
    assert_eq!(last_writer, Some(10), "the writers run before the later readers: {begun:?}");
}

#[tokio::test]
async fn at_most_four_places_of_a_pool_are_taken() {
    let place = Place::new(&["light-job", "heavy-job"]).await;
    place.program("bin/on-pool", &place.block("CI runners on a pool", "sh", 0));
    let job = |weight: &str| {
        place.command(&["on-pool", weight, &format!("{weight}-job")]).spawn().unwrap()
    };
    place.hold();
    let mut all: Vec<_> = (0..4).map(|_| job("light")).collect();
    place.begun(4).await;
    all.extend(["heavy", "light", "heavy", "light", "light", "light"].map(job));
    eventually("six wait", async || (waiting(&place.gateway).await.0 == 6).then_some(())).await;
    let (code, output) = run(place.command(&["redlock", "status", "ci/machines"])).await;
    assert!(code == Some(0) && output.contains("4 of 4 slots are held"), "{output}");
    assert!(output.contains("slot 4: "), "{output}");
    place.go();
    for child in all {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
    let (mut places, mut most) = (0, 0);
    for line in &place.log() {
        let weight = if line[2] == "heavy-job" { 2 } else { 1 };
        places = if line[0] == "begin" { places + weight } else { places - weight };
        most = most.max(places);
    }
    assert_eq!((places, most), (0, 4), "{:?}", place.log());
}

#[tokio::test]
async fn a_deployment_of_two_environments_runs_only_with_both() {
    let place = Place::new(&["deploy-both-environments"]).await;
    place.program(
        "bin/deploy-both",
        &place.block("A deployment that needs two environments", "sh", 0),
    );
    let other = place.gateway.acquire_for("env/production", 300_000).await;
    let deploys: Vec<_> = ["a1", "b2"]
        .iter()
        .map(|commit| place.command(&["deploy-both", commit]).spawn().unwrap())
        .collect();
    eventually("both wait", async || (waiting(&place.gateway).await.0 == 2).then_some(())).await;
    // While they wait, they hold neither lock.
    assert_eq!(place.gateway.inspect("env/staging").await["state"], "free");
    place.hold();
    assert_eq!(place.gateway.delete("env/production", &other.token).await.status, 204);
    place.begun(1).await;
    for name in ["env/staging", "env/production"] {
        assert_eq!(place.gateway.inspect(name).await["state"], "held");
    }
    place.go();
    for child in deploys {
        let (code, output) = ended(child).await;
        assert_eq!(code, Some(0), "{output}");
    }
    place.assert_one_at_a_time(2);
    place.assert_free("env/staging").await;
    place.assert_free("env/production").await;
}

#[tokio::test]
async fn only_the_newest_build_deploys() {
    let place = Place::new(&["deploy-production"]).await;
    place.program("bin/deploy", &place.block("Only the newest build deploys", "sh", 0));
    let deploy = |commit: &str| place.command(&["deploy", commit]).spawn().unwrap();
    place.hold();
    let running = deploy("a1");
    place.begun(1).await;
    let mut waits = deploy("b2");
    eventually("the second build waits", async || {
        (waiting(&place.gateway).await.0 == 1).then_some(())
    })
    .await;
    for commit in ["c3", "d4"] {
        let newer = deploy(commit);
        let (code, output) = ended(std::mem::replace(&mut waits, newer)).await;
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains("superseded"), "{output}");
    }
    place.go();
    for build in [running, waits] {
        let (code, output) = ended(build).await;
        assert_eq!(code, Some(0), "{output}");
    }
    place.assert_one_at_a_time(2);
    place.assert_free("deploy/production").await;
}

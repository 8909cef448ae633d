//! Runners and watchdogs that are killed or stopped. Also systems that hide processes or refuse
//! system calls.

use std::cell::Cell;
use std::path::Path;
use std::process::Stdio;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::task::LocalSet;

use super::{LEFT, TWO, binary, code_and_words, ended, gone, lives, number, redlock, script};
use crate::support::chance::{Chance, seed};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{TempDir, daily_or_long, eventually};

/// The uid and gid of the user `nobody`, who owns none of the files here.
const NOBODY: &str = "65534";

fn pid(number: i32) -> Pid {
    Pid::from_raw(number).unwrap()
}

fn send(number: i32, signal: Signal) {
    // The process may have ended already.
    let _ = kill_process(pid(number), signal);
}

/// Kills the process when the test ends.
struct KillOnDrop(i32);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if lives(self.0) {
            send(self.0, Signal::KILL);
        }
    }
}

pub(super) fn runner(child: &Child) -> i32 {
    child.id().expect("nobody has waited for it") as i32
}

/// All processes: pid, parent's pid, and command line.
fn processes() -> Vec<(i32, i32, String)> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let read = |number: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        let words = std::fs::read(format!("/proc/{number}/cmdline")).ok()?;
        Some((number, parent, String::from_utf8_lossy(&words).replace('\0', " ")))
    };
    numbers.filter_map(read).collect()
}

/// The two watchdogs of a runner, the outer one first.
fn watchdogs(runner: i32) -> Vec<i32> {
    let all = processes();
    let below = |number: i32| {
        let child =
            all.iter().find(|(_, parent, words)| *parent == number && words.contains("__watchdog"));
        child.map(|(number, ..)| *number)
    };
    std::iter::successors(below(runner), |outer| below(*outer)).collect()
}

pub(super) async fn both_watchdogs(runner: i32) -> [i32; 2] {
    eventually("both watchdogs are there", async || watchdogs(runner).try_into().ok()).await
}

/// Compiles a C program and sets its setuid bit. Returns its path.
async fn compiled(dir: &TempDir, name: &str, source: &str) -> String {
    let path = |name: String| dir.path().join(name).to_str().unwrap().to_owned();
    let text = path(format!("{name}.c"));
    let program = path(name.to_owned());
    std::fs::write(&text, source).unwrap();
    let built = Command::new("cc").args(["-o", &program, &text]).output().await.expect("cc starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let mode = Command::new("chmod").args(["4755", &program]).status().await.unwrap();
    assert!(mode.success());
    program
}

/// `other FILE` becomes root, writes its pid to the file, and runs for ever. `other FILE setsid`
/// first leaves its process group.
const OTHER: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    signal(SIGTERM, SIG_IGN);
    if (count > 2) setsid();
    if (setuid(0)) return 1;
    FILE *out = fopen(words[1], "w");
    fprintf(out, "%d\n", getpid());
    fclose(out);
    for (;;) sleep(1);
}
"#;

fn is_root(what: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("NOT RUN, because this is not root: {what}");
    }
    is_root
}

async fn state(gateway: &Gateway, name: &str) -> String {
    gateway.inspect(name).await["state"].as_str().unwrap().to_owned()
}

/// Checks that a run has left no process and no lock behind. On a busy machine, killed processes may
/// not be gone within a second. Then the run says so, and leaves the lock to its TTL.
async fn nothing_is_left(gateway: &Gateway, processes: &[i32], err: &str) {
    let is_over = async || {
        let are_gone = !processes.iter().any(|process| lives(*process));
        (are_gone && state(gateway, "job").await == "free").then_some(())
    };
    if err.contains("could not be stopped") {
        return eventually("everything ends", is_over).await;
    }
    assert!(
        is_over().await.is_some(),
        "a process would outlive a runner that is killed now: {err}"
    );
}

#[tokio::test]
async fn a_stopped_watchdog_ends_the_run() {
    let gateway = Launch::embedded().ready().await;
    // If the outer watchdog is stopped, the inner one still reports the command's exit code (143).
    // Without the inner one the exit code is 70.
    for (which, expected) in [(0, 143), (1, 70)] {
        let dir = TempDir::new();
        let runner_process =
            redlock(&gateway, &script(&dir, &["--ttl", "9s"], TWO)).spawn().unwrap();
        let grandchild = number(&dir, "grandchild").await;
        let child = number(&dir, "child").await;
        let watchdogs = both_watchdogs(runner(&runner_process)).await;
        send(watchdogs[which], Signal::STOP);
        let (code, err) = code_and_words(runner_process).await;
        assert!(
            code == Some(expected) && err.contains("a watchdog was killed or stopped"),
            "{which}: {code:?} {err}"
        );
        nothing_is_left(&gateway, &[grandchild, child], &err).await;
        eventually("no watchdog is left", async || {
            watchdogs.iter().all(|pid| !lives(*pid)).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_killed_watchdog_ends_the_run() {
    let gateway = Launch::embedded().ready().await;
    // When the inner watchdog is killed, the command is killed with it, without a grace. So the
    // command's exit code is lost, and the exit code is 70.
    for (which, expected) in [(0, 143), (1, 70)] {
        let dir = TempDir::new();
        let runner_process =
            redlock(&gateway, &script(&dir, &["--ttl", "9s"], TWO)).spawn().unwrap();
        let grandchild = number(&dir, "grandchild").await;
        let child = number(&dir, "child").await;
        send(both_watchdogs(runner(&runner_process)).await[which], Signal::KILL);
        let (code, err) = code_and_words(runner_process).await;
        assert!(
            code == Some(expected) && err.contains("a watchdog was killed or stopped"),
            "{which}: {code:?} {err}"
        );
        nothing_is_left(&gateway, &[grandchild, child], &err).await;
    }
}

/// An orphan in its own session, which has no environment. The command itself ignores TERM.
const WIPED: &str = r#"
    (env -i setsid /bin/sh -c 'trap "" TERM; echo $$ > "$1/wiped"; while :; do sleep 1; done' sh "$1" &)
    trap '' TERM; while :; do sleep 1; done"#;

#[tokio::test]
async fn an_orphan_without_environment_dies_with_any_two_of_three() {
    let gateway = Launch::embedded().ready().await;
    for victims in [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[1, 2]] {
        let dir = TempDir::new();
        let mut runner_process =
            redlock(&gateway, &script(&dir, &["--ttl", "6s"], WIPED)).spawn().unwrap();
        let wiped = number(&dir, "wiped").await;
        let _killed_at_end = KillOnDrop(wiped);
        let runner = runner(&runner_process);
        let [outer, inner] = both_watchdogs(runner).await;
        victims.iter().for_each(|victim| send([runner, outer, inner][*victim], Signal::KILL));
        gone(wiped).await;
        runner_process.wait().await.unwrap();
        eventually("the lock is free", async || {
            (state(&gateway, "job").await == "free").then_some(())
        })
        .await;
    }
}

/// `denied COMMAND…` runs a command. Two system calls fail for it as they would on an older kernel.
const DENIED: &str = r#"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int count, char **words) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_send_signal, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 1;
    execv(words[1], words + 1);
    return 1;
}
"#;

#[tokio::test]
async fn without_pidfd_processes_outside_the_group_are_killed() {
    let gateway = Launch::embedded().ready().await;
    let tools = TempDir::new();
    let denied = compiled(&tools, "denied", DENIED).await;
    for is_killed in [false, true] {
        let dir = TempDir::new();
        let work = format!("echo \"$REDLOCK_TOKEN\" > \"$1/token\"; {LEFT}");
        let mut command = Command::new(&denied);
        command.arg(binary()).args(script(&dir, &["--ttl", "9s", "--grace", "300ms"], &work));
        command
            .env("REDLOCK_URL", format!("http://{}", gateway.address()))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let mut runner = command.spawn().unwrap();
        let timed = number(&dir, "timed").await;
        let session = number(&dir, "session").await;
        let _killed_at_end = [timed, session].map(KillOnDrop);
        if is_killed {
            runner.start_kill().unwrap();
        } else {
            let token = std::fs::read_to_string(dir.path().join("token")).unwrap();
            assert_eq!(gateway.delete("job", token.trim()).await.status, 204);
        }
        gone(timed).await;
        gone(session).await;
        let code = runner.wait().await.unwrap().code();
        assert_eq!(code, if is_killed { None } else { Some(79) });
        eventually("the lock is free", async || {
            (state(&gateway, "job").await == "free").then_some(())
        })
        .await;
    }
}

/// A command that runs `redlock` as an unprivileged user, with a program that becomes root.
async fn as_nobody(gateway: &Gateway, dir: &TempDir, before: &str, work: &str) -> Command {
    let other = compiled(dir, "other", OTHER).await;
    // The user `nobody` may not read the build directory, so it gets a copy of the program. `cp`
    // makes the copy, because this process must never have it open for writing: a process that
    // another test starts at that moment inherits the open file, and the kernel refuses to run a
    // file that anybody has open for writing.
    let redlock = dir.path().join("redlock");
    let copied = Command::new("cp").arg(binary()).arg(&redlock).status().await.unwrap();
    assert!(copied.success());
    let user = format!("setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups");
    let start = format!(
        r#"{before} exec {user} "$0" run job --ttl 5m --grace 300ms -- sh -c "$1" sh "$2" "$3""#
    );
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-euc", &start])
        .arg(redlock)
        .arg(work)
        .arg(dir.path())
        .arg(other);
    command.env("REDLOCK_URL", format!("http://{}", gateway.address()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

#[tokio::test]
async fn a_lock_is_kept_while_hidden_processes_run() {
    if !is_root("hidepid=2") {
        return;
    }
    let gateway = Launch::embedded().ready().await;
    for (where_to, is_asked) in [("", false), ("setsid", true)] {
        let dir = TempDir::new();
        let end = if is_asked {
            "while :; do sleep 1; done"
        } else {
            r#"while [ ! -e "$1/left" ]; do sleep 0.05; done"#
        };
        let work = format!(r#""$2" "$1/left" {where_to} 2> /dev/null & {end}"#);
        let hide = "mount -t proc -o hidepid=2 proc /proc;";
        let runner_process = as_nobody(&gateway, &dir, hide, &work).await.spawn().unwrap();
        let left = number(&dir, "left").await;
        let _killed_at_end = KillOnDrop(left);
        if is_asked {
            send(runner(&runner_process), Signal::TERM);
        }
        let (code, err) = code_and_words(runner_process).await;
        let is_there = lives(left);
        let state = state(&gateway, "job").await;
        assert!(is_there && state == "held", "{code:?} {state}: {err}");
        assert!(err.contains("could not be stopped"), "{code:?} {err}");
        gateway.call(http::Method::DELETE, "/locks/job?force=true").send().await;
    }
}

/// A cgroup below the one of this process. Its owner is the user `nobody`.
struct Delegated(std::path::PathBuf);

impl Delegated {
    fn new() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount =
            mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?.to_owned();
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
        let path = Path::new(&mount).join(own).join(format!("redlock-test-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        let cgroup = Self(path);
        if !cgroup.0.join("cgroup.kill").exists() {
            return None;
        }
        let user = NOBODY.parse().ok();
        std::os::unix::fs::chown(&cgroup.0, user, user).ok()?;
        std::os::unix::fs::chown(cgroup.0.join("cgroup.procs"), user, user).ok()?;
        Some(cgroup)
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn a_delegated_cgroup_ends_processes_no_signal_reaches() {
    if !is_root("a delegated cgroup") {
        return;
    }
    let Some(cgroup) = Delegated::new() else {
        return eprintln!("NOT RUN, because no cgroup (version 2) can be made here");
    };
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let enter = format!("echo $$ > {}/cgroup.procs;", cgroup.0.display());
    let work = r#""$2" "$1/left" setsid 2> /dev/null & while :; do sleep 1; done"#;
    let runner_process = as_nobody(&gateway, &dir, &enter, work).await.spawn().unwrap();
    let left = number(&dir, "left").await;
    let _killed_at_end = KillOnDrop(left);
    send(runner(&runner_process), Signal::TERM);
    let (code, err) = code_and_words(runner_process).await;
    assert!(code == Some(143) && !lives(left), "{code:?} {err}");
    assert_eq!(state(&gateway, "job").await, "free");
    let inside =
        std::fs::read_dir(&cgroup.0).unwrap().flatten().filter(|entry| entry.path().is_dir());
    assert_eq!(
        inside.map(|entry| entry.file_name()).collect::<Vec<_>>(),
        [""; 0],
        "redlock removes its own cgroups"
    );
}

#[tokio::test]
async fn a_lost_lock_stops_the_command_while_stderr_is_full() {
    use std::io::Write;
    let gateway = Launch::embedded().ready().await;
    let dir = TempDir::new();
    let (_unread, mut full) = std::io::pipe().unwrap();
    full.write_all(&[b'x'; 64 * 1024]).unwrap();
    let work = format!(r#"trap '' TERM; echo "$REDLOCK_TOKEN" > "$1/token"; {TWO}"#);
    let mut command = redlock(&gateway, &script(&dir, &["--ttl", "9s", "--grace", "300ms"], &work));
    let runner = command.stderr(full).spawn().unwrap();
    let grandchild = number(&dir, "grandchild").await;
    let child = number(&dir, "child").await;
    let token = std::fs::read_to_string(dir.path().join("token")).unwrap();
    assert_eq!(gateway.delete("job", token.trim()).await.status, 204);
    gone(child).await;
    gone(grandchild).await;
    assert_eq!(ended(runner).await.status.code(), Some(79));
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    /// The command of a storm. It starts three processes: one in its own group, one in a session of
    /// its own, and an orphan without an environment. Each process has a word in its command line by
    /// which the test finds it. Each ignores SIGTERM.
    const STORM: &str = r#"
    trap '' TERM
    sh -c 'trap "" TERM; while :; do sleep 1; done' "$2" &
    setsid sh -c 'trap "" TERM; while :; do sleep 1; done' "$2" &
    (env -i setsid /bin/sh -c 'trap "" TERM; while :; do /bin/sleep 1; done' "$2" &)
    while :; do sleep 1; done"#;

    /// One run, two of whose three processes (the runner and two watchdogs) are killed or stopped.
    /// Fails if any process of the command still runs when the next holder has the lock.
    async fn storm(gateway: &Gateway, part: usize, mut chance: Chance) -> Result<(), String> {
        let name = format!("storm-{part}");
        let marker = format!("storm-{}-{part}.", std::process::id());
        let mut command = redlock(
            gateway,
            &["run", &name, "--ttl", "3s", "--", "sh", "-c", STORM, "sh", "dir", &marker],
        );
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let runner = runner(&child);
        // Half of the storms begin as soon as the lock is held. So they can hit every moment in the
        // start of the command.
        eventually("the runner has the lock", async || {
            (state(gateway, &name).await == "held").then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(
            chance.below(2) as u64 * chance.below(2_000) as u64,
        ))
        .await;
        let all = [&[runner][..], &watchdogs(runner)].concat();
        let two = [chance.below(3), chance.below(3)];
        for victim in two {
            let Some(victim) = all.get(victim) else { continue };
            send(*victim, if chance.one_in(2) { Signal::KILL } else { Signal::STOP });
        }
        let body = json!({ "ttl_ms": 60_000, "wait_ms": 20_000 });
        let answer = gateway.post(&name, body).await;
        let left: Vec<_> = processes()
            .into_iter()
            .filter(|(pid, _, words)| words.contains(&marker) && *pid != runner)
            .collect();
        // A zombie has no command line. A process named `__exec` has not become the command yet.
        let left: Vec<_> = left
            .into_iter()
            .filter(|(pid, _, words)| lives(*pid) && !words.contains("__exec"))
            .collect();
        let summary = format!("{part}: {two:?} of {all:?}: {} {left:?}", answer.status);
        send(runner, Signal::KILL);
        child.wait().await.unwrap();
        // A stopped watchdog would outlive the test, so all of them continue.
        all.iter().skip(1).for_each(|watchdog| send(*watchdog, Signal::CONT));
        left.iter().for_each(|(pid, ..)| send(*pid, Signal::KILL));
        if answer.status == 201 && left.is_empty() { Ok(()) } else { Err(summary) }
    }

    #[tokio::test]
    async fn nothing_runs_once_the_next_holder_has_the_lock() {
        let (runs, at_once) = daily_or_long((40, 8), (1_000, 16));
        let seed = seed("REDLOCK_STORM_SEED");
        let gateway = Rc::new(Launch::embedded().ready().await);
        let next = Rc::new(Cell::new(0));
        measured("the end of a command before the next holder", async || {
            // Each measurement has storms of its own.
            storms(&gateway, &next, next.get() + runs, at_once, seed).await
        })
        .await;
    }

    /// Runs the storms up to number `end`, several at once.
    async fn storms(
        gateway: &Rc<Gateway>,
        next: &Rc<Cell<usize>>,
        end: usize,
        at_once: usize,
        seed: u64,
    ) -> Result<(), String> {
        let begin = Instant::now();
        let first = next.get();
        let mut failed = Vec::new();
        let here = LocalSet::new();
        let lines = (0..at_once).map(|_| {
            let gateway = gateway.clone();
            let next = next.clone();
            here.spawn_local(async move {
                let mut failed = Vec::new();
                while next.get() < end {
                    let part = next.replace(next.get() + 1);
                    failed.extend(storm(&gateway, part, Chance::of(seed, part)).await.err());
                }
                failed
            })
        });
        let lines: Vec<_> = lines.collect();
        here.await;
        for line in lines {
            failed.extend(line.await.unwrap());
        }
        println!(
            "{} runs, {} with something left, {:.0} s",
            end - first,
            failed.len(),
            begin.elapsed().as_secs_f64()
        );
        if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
    }
}

#[tokio::test]
async fn a_run_works_in_a_pid_namespace_without_its_process_group() {
    if !is_root("a PID namespace") {
        return;
    }
    let gateway = Launch::embedded().ready().await;
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(binary());
    command
        .args(["run", "job", "true"])
        .env("REDLOCK_URL", format!("http://{}", gateway.address()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let (code, err) = code_and_words(command.spawn().unwrap()).await;
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(state(&gateway, "job").await, "free");
}

//! Child processes. This module starts them, waits for them, reads how much they consume, and ends
//! them.
//!
//! No child outlives this program. A `Process` kills its child when it is dropped. If this program
//! is killed, the kernel kills the child. A child has its own process group, so an interrupt from
//! the terminal reaches only this program, which then ends the children in order. Each child's
//! output goes to a file, which is shown if the child fails. All of this needs Linux, because it
//! uses setpriv and /proc.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use procfs::process::{Process as Kernel, Stat, Status};
use procfs::{CurrentSI as _, KernelStats, ProcResult};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::report::{LOAD_BUSY, OTHERS, Row, Unit, cores};

/// A server that is not ready within this time has failed.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(15);
/// Interval between readiness checks.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// A directory for the files of children. It is removed when the value is dropped.
pub(crate) fn scratch() -> Result<TempDir, String> {
    TempDir::with_prefix("redlock-bench-")
        .map_err(|error| format!("cannot create a directory: {error}"))
}

/// A child process, killed when dropped.
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a child. Must be called on the main thread: the kernel kills the child when the
    /// thread that spawned it ends, not when the process ends.
    pub(crate) fn spawn(
        name: &str,
        program: &Path,
        args: &[impl AsRef<OsStr>],
        scratch: &TempDir,
    ) -> Result<Self, String> {
        let place = tempfile::Builder::new()
            .prefix(&name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"))
            .tempdir_in(scratch);
        let fault = |error| format!("cannot write below {}: {error}", scratch.path().display());
        let directory = place.map_err(fault)?.keep();
        let log = directory.join("log");
        let output =
            File::create(&log).and_then(|file| Ok((file.try_clone()?, file))).map_err(fault)?;
        let mut command = Command::new("setpriv");
        // The kernel is told only after the start to kill the child. If this program has ended
        // before that, the shell starts nothing.
        let only_below_us = r#"[ "$PPID" = "$0" ] && exec "$@""#;
        command.args([
            "--pdeathsig",
            "KILL",
            "--",
            "sh",
            "-c",
            only_below_us,
            &std::process::id().to_string(),
        ]);
        command.arg(program).args(args);
        command.current_dir(&directory).process_group(0);
        command.stdin(Stdio::null()).stdout(output.0).stderr(output.1);
        // A gateway's settings in the environment of this program must not change the measurement.
        for (variable, _) in std::env::vars_os() {
            if variable == "RUST_LOG" || variable.as_encoded_bytes().starts_with(b"REDLOCK_") {
                command.env_remove(variable);
            }
        }
        let child = command
            .spawn()
            .map_err(|error| format!("cannot run setpriv (package util-linux): {error}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// User and system time of all threads of the child so far.
    pub(crate) fn cpu(&self) -> Result<Duration, String> {
        read(self.kernel().and_then(|it| it.stat())).map(|stat| cpu_time(&stat))
    }

    /// Resident memory now and at its peak, in bytes.
    pub(crate) fn memory(&self) -> Result<Memory, String> {
        read(self.kernel().and_then(|it| it.status())).map(|status| Memory::of(&status))
    }

    fn kernel(&self) -> ProcResult<Kernel> {
        Kernel::new(self.child.id().cast_signed())
    }

    /// The last lines of the child's output.
    pub(crate) fn log_tail(&self) -> String {
        let text = String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned();
        let lines: Vec<_> = text.lines().collect();
        format!(
            "{} printed:\n  {}",
            self.name,
            lines[lines.len().saturating_sub(15)..].join("\n  ")
        )
    }

    fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok()??;
        Some(format!("{} ended by itself ({status}); {}", self.name, self.log_tail()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only if the child has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memory {
    pub(crate) now: f64,
    pub(crate) peak: f64,
}

impl Memory {
    fn of(status: &Status) -> Self {
        let bytes = |kib: Option<u64>| kib.unwrap_or_default() as f64 * 1024.0;
        Self { now: bytes(status.vmrss), peak: bytes(status.vmhwm) }
    }

    pub(crate) fn own() -> Result<Self, String> {
        read(Kernel::myself().and_then(|it| it.status())).map(|status| Self::of(&status))
    }
}

/// CPU time during one measurement, by who used it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpu {
    pub(crate) server: Duration,
    /// All masters together.
    pub(crate) redis: Duration,
    /// This program.
    pub(crate) load: Duration,
    /// Everything else on the machine, except the delaying network.
    pub(crate) others: Duration,
    pub(crate) elapsed: Duration,
}

impl Cpu {
    /// Adds the CPU time per request, and the figures that show a disturbed measurement. If the
    /// contender runs in this process, the CPU time of the load counts as the server's.
    pub(crate) fn add_to(
        self,
        row: &mut Row,
        per: &str,
        requests: f64,
        load_threads: u32,
        in_process: bool,
    ) {
        let seconds = self.elapsed.as_secs_f64();
        let (server, load) =
            if in_process { (self.load, Duration::ZERO) } else { (self.server, self.load) };
        for (who, time) in [("its", server), ("Redis", self.redis), ("load", load)] {
            row.add(
                &format!("{who} CPU µs/{per}"),
                Unit::Micros,
                time.as_secs_f64() * 1e6 / requests,
            );
        }
        row.add(
            LOAD_BUSY,
            Unit::Percent,
            load.as_secs_f64() * 100.0 / f64::from(load_threads) / seconds,
        );
        self.add_others_to(row);
    }

    pub(crate) fn add_others_to(self, row: &mut Row) {
        let share = self.others.as_secs_f64() / f64::from(cores()) / self.elapsed.as_secs_f64();
        row.add(OTHERS, Unit::Percent, share * 100.0);
    }
}

/// CPU time so far of the masters, and of the delaying network in front of them.
pub(crate) struct MastersCpu {
    pub(crate) masters: Duration,
    pub(crate) network: Duration,
}

/// A reading of the clock and of all CPU times.
pub(crate) struct Accounts {
    at: Instant,
    server: Duration,
    redis: Duration,
    load: Duration,
    machine: Duration,
}

impl Accounts {
    pub(crate) fn read<'a>(
        servers: impl IntoIterator<Item = &'a Process>,
        MastersCpu { masters, network }: MastersCpu,
    ) -> Result<Self, String> {
        Ok(Self {
            at: Instant::now(),
            server: servers.into_iter().map(Process::cpu).sum::<Result<_, _>>()?,
            redis: masters,
            load: own_cpu()?,
            machine: machine_cpu()?.saturating_sub(network),
        })
    }

    pub(crate) fn since(&self, before: &Self) -> Cpu {
        let more = |part: fn(&Self) -> Duration| part(self).saturating_sub(part(before));
        let server = more(|it| it.server);
        let redis = more(|it| it.redis);
        let load = more(|it| it.load);
        let others = more(|it| it.machine).saturating_sub(server + redis + load);
        Cpu { server, redis, load, others, elapsed: self.at - before.at }
    }
}

/// The CPU time of this program, which counts as the load's.
fn own_cpu() -> Result<Duration, String> {
    read(Kernel::myself().and_then(|it| it.stat())).map(|stat| cpu_time(&stat))
}

/// CPU time that all programs on this machine have used, or that its host took away.
fn machine_cpu() -> Result<Duration, String> {
    let total = read(KernelStats::current())?.total;
    let given = [total.irq, total.softirq, total.steal].into_iter().flatten().sum::<u64>();
    Ok(ticks(total.user + total.nice + total.system + given))
}

fn cpu_time(stat: &Stat) -> Duration {
    ticks(stat.utime + stat.stime)
}

fn ticks(ticks: u64) -> Duration {
    Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64)
}

fn read<T>(result: ProcResult<T>) -> Result<T, String> {
    result.map_err(|error| format!("cannot read /proc: {error}"))
}

/// Raises the limit of open files, which children inherit.
pub(crate) fn allow_open_files(needed: u64) -> Result<(), String> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let limit = maximum.unwrap_or(u64::MAX);
    if limit < needed {
        return Err(format!(
            "{needed} files must be open at once, but the hard limit is {limit} (`ulimit -Hn`)"
        ));
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| format!("cannot raise the limit of open files: {error}"))
}

/// An address on which nobody listens. Another program may take it before the intended server does;
/// then that server ends.
pub(crate) fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| format!("no free port on 127.0.0.1: {error}"))
}

/// Repeats `attempt` until it succeeds. Fails with the last reason if the process ends or the time
/// is over.
pub(crate) async fn wait_until(
    process: &mut Process,
    within: Duration,
    mut attempt: impl AsyncFnMut() -> Result<(), String>,
) -> Result<(), String> {
    let began = Instant::now();
    let mut reason = "it does not answer".to_owned();
    loop {
        if let Some(ended) = process.ended() {
            return Err(ended);
        }
        let Some(left) = within.checked_sub(began.elapsed()) else {
            let name = &process.name;
            return Err(format!(
                "{name} is not ready after {within:?}: {reason}; {}",
                process.log_tail()
            ));
        };
        match tokio::time::timeout(left, attempt()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => reason = error,
            Err(_) => {}
        }
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cpu_time_rises_and_is_part_of_the_machines() {
        let before = own_cpu().unwrap();
        let began = Instant::now();
        while own_cpu().unwrap() == before {
            assert!(began.elapsed() < Duration::from_secs(30), "no CPU time is accounted");
        }
        assert!(machine_cpu().unwrap() > own_cpu().unwrap());
    }
}

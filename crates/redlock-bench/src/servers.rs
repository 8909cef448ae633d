//! Child processes: starting them, waiting until they are of use, reading what they consumed, and ending them.
//!
//! Nothing that was started survives this program: a `Process` kills its child when dropped, and the kernel kills it
//! when this program is killed itself. A child has its own process group, so an interrupt from the terminal reaches
//! this program only, which then ends the others in order. What children print goes to a file each, shown when
//! they fail. Linux only, because of setpriv and /proc.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// A server that is not ready by then has failed.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(15);
/// Between two looks at a server that is not ready.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A directory of its own, removed with everything in it.
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn create() -> Result<Self, String> {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("redlock-bench-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Self { path })
    }

    /// Writes a file for a program to read.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.path.join(name);
        fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that cannot be removed is not worth failing for.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A child process, killed when dropped.
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Must be called on the main thread: the kernel's death signal follows the thread that spawned the child, not its
    /// process.
    pub(crate) fn spawn(
        name: &str,
        program: &Path,
        args: &[impl AsRef<OsStr>],
        scratch: &Scratch,
    ) -> Result<Self, String> {
        let directory = scratch.path.join(name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        let log = directory.join("log");
        let output = fs::create_dir(&directory)
            .and_then(|()| File::create(&log))
            .and_then(|file| Ok((file.try_clone()?, file)))
            .map_err(|error| format!("cannot write below {}: {error}", directory.display()))?;
        let mut command = Command::new("setpriv");
        // The shell in between starts nothing when this program ended before its death was made to matter.
        let only_below_us = r#"[ "$PPID" = "$0" ] && exec "$@""#;
        command.args(["--pdeathsig", "KILL", "--", "sh", "-c", only_below_us, &std::process::id().to_string()]);
        command.arg(program).args(args);
        command.current_dir(&directory).process_group(0);
        command.stdin(Stdio::null()).stdout(output.0).stderr(output.1);
        // The caller's own settings for a gateway or its log must not change what is measured.
        for (variable, _) in std::env::vars_os() {
            if variable == "RUST_LOG" || variable.as_encoded_bytes().starts_with(b"REDLOCK_") {
                command.env_remove(variable);
            }
        }
        let child = command.spawn().map_err(|error| format!("cannot run setpriv (package util-linux): {error}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// User and system time of all its threads so far.
    pub(crate) fn cpu(&self) -> Result<Duration, String> {
        cpu_of(&self.child.id().to_string())
    }

    /// The most memory it ever had resident.
    pub(crate) fn peak_memory_bytes(&self) -> Result<u64, String> {
        self.memory("VmHWM:")
    }

    /// The memory it has resident now.
    pub(crate) fn memory_bytes(&self) -> Result<u64, String> {
        self.memory("VmRSS:")
    }

    fn memory(&self, field: &str) -> Result<u64, String> {
        memory_of(&self.child.id().to_string(), field)?.ok_or_else(|| format!("{} has ended", self.name))
    }

    /// Everything it printed.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines it printed.
    pub(crate) fn log_tail(&self) -> String {
        let text = self.output();
        let lines: Vec<_> = text.lines().collect();
        match lines.as_slice() {
            [] => format!("{} printed nothing", self.name),
            lines => format!("{} printed:\n  {}", self.name, lines[lines.len().saturating_sub(15)..].join("\n  ")),
        }
    }

    fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok()??;
        Some(format!("{} ended by itself ({status}); {}", self.name, self.log_tail()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU time spent during a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpu {
    pub(crate) server: Duration,
    /// All masters together.
    pub(crate) redis: Duration,
    /// This program, less what it spends on being the network.
    pub(crate) load: Duration,
    /// Everything else on the machine but the network.
    pub(crate) others: Duration,
}

impl Cpu {
    /// When what was measured was no server but this program, with no load besides.
    pub(crate) fn in_process(self) -> Self {
        Self { server: self.load, load: Duration::ZERO, ..self }
    }
}

/// CPU time so far of the masters, and of the network before them, which is a part of this program.
pub(crate) struct MastersCpu {
    pub(crate) masters: Duration,
    pub(crate) network: Duration,
}

/// A look at everybody's CPU time so far.
pub(crate) struct Accounts {
    server: Duration,
    redis: Duration,
    load: Duration,
    machine: Duration,
}

impl Accounts {
    pub(crate) fn look<'a>(
        servers: impl IntoIterator<Item = &'a Process>,
        MastersCpu { masters, network }: MastersCpu,
    ) -> Result<Self, String> {
        Ok(Self {
            server: servers.into_iter().map(Process::cpu).sum::<Result<_, _>>()?,
            redis: masters,
            load: own_cpu()?.saturating_sub(network),
            machine: machine_cpu()?.saturating_sub(network),
        })
    }

    pub(crate) fn since(&self, before: &Self) -> Cpu {
        let [server, redis, load, machine] = [
            self.server.saturating_sub(before.server),
            self.redis.saturating_sub(before.redis),
            self.load.saturating_sub(before.load),
            self.machine.saturating_sub(before.machine),
        ];
        Cpu { server, redis, load, others: machine.saturating_sub(server + redis + load) }
    }
}

/// The CPU time of this program, which is the load's.
fn own_cpu() -> Result<Duration, String> {
    cpu_of("self")
}

/// The CPU time that everything on this machine took, or that its host took away from it; proc_stat(5).
fn machine_cpu() -> Result<Duration, String> {
    let stat = fs::read_to_string("/proc/stat").map_err(|error| format!("cannot read /proc/stat: {error}"))?;
    machine_ticks(&stat).map(ticks).ok_or_else(|| "/proc/stat does not begin with the CPU time of all cores".into())
}

/// user, nice, system, irq, softirq and steal, without idle and iowait.
fn machine_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().map(str::parse::<u64>);
    let mut field = || fields.next()?.ok();
    let [user, nice, system, _idle, _iowait, irq, softirq, steal] =
        [field()?, field()?, field()?, field()?, field()?, field()?, field()?, field()?];
    Some(user + nice + system + irq + softirq + steal)
}

fn ticks(ticks: u64) -> Duration {
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The most memory that this program ever had resident.
pub(crate) fn own_peak_memory_bytes() -> Result<u64, String> {
    memory_of("self", "VmHWM:")?.ok_or_else(|| "/proc/self/status has no VmHWM".into())
}

/// The memory that this program has resident now.
pub(crate) fn own_memory_bytes() -> Result<u64, String> {
    memory_of("self", "VmRSS:")?.ok_or_else(|| "/proc/self/status has no VmRSS".into())
}

/// proc_pid_status(5); `None` of a process that has ended and is not waited for.
fn memory_of(process: &str, field: &str) -> Result<Option<u64>, String> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let mut lines = status.lines();
    let kib = lines.find_map(|line| line.strip_prefix(field)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.map(|kib| kib * 1024))
}

pub(crate) fn cpu_of(process: &str) -> Result<Duration, String> {
    let path = format!("/proc/{process}/stat");
    let stat = fs::read_to_string(&path).map_err(|error| format!("cannot read {path}: {error}"))?;
    cpu_ticks(&stat).map(ticks).ok_or_else(|| format!("{path} has no CPU time: {stat:?}"))
}

/// Fields 14 and 15, utime and stime; proc_pid_stat(5). The second field is the program's name, in parentheses, and may
/// contain spaces and parentheses itself.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// An address nobody listens on. Somebody else may take it before it is used; the server that was to have it then ends.
pub(crate) fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| format!("no free port on 127.0.0.1: {error}"))
}

/// Tries until it succeeds. Fails when the process ends or the time is over, with the last reason.
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
            let (name, seconds) = (&process.name, within.as_secs());
            return Err(format!("{name} is not ready after {seconds} s: {reason}; {}", process.log_tail()));
        };
        match tokio::time::timeout(left, attempt()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => reason = error,
            Err(_) => {}
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_past_any_program_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 900 0 0 0 31 11 7 8 20 0 6 0 12345 7";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("42 (a) S 1"), None);
    }

    #[test]
    fn idle_time_is_not_cpu_time() {
        assert_eq!(machine_ticks("cpu  1 2 4 1000 1000 8 16 32 64 128\ncpu0 9 9 9\n"), Some(63));
        assert_eq!(machine_ticks("cpu0 1 2 3 4 5 6 7 8 9\n"), None);
        assert!(machine_cpu().unwrap() > own_cpu().unwrap());
    }

    #[test]
    fn own_cpu_time_rises_with_work() {
        let before = own_cpu().unwrap();
        let began = Instant::now();
        while own_cpu().unwrap() == before {
            assert!(began.elapsed() < Duration::from_secs(30), "no CPU time is accounted");
        }
    }
}

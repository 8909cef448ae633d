//! The masters, and the condition in which they are measured: all healthy, one stopped, one late,
//! or all behind a network.
//!
//! If only one master is affected, it is always the last one. Contenders and load stay the same;
//! only the way to the masters changes. Nothing on that way parses or answers anything. The delay
//! is measured, and figures are compared with the measured delay.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::network::{self, Delays};
use crate::report::{median, millis};
use crate::servers::{MastersCpu, Process, READY_WITHIN, free_address, wait_until};

/// Number of masters in every run. Five is the smallest number of which two may fail.
const MASTERS: usize = 5;
/// How many round trips are measured. Their median counts.
const ROUND_TRIPS: usize = 21;
/// The login of a user that may not call the module, so that its gateway uses scripts.
pub(crate) const SCRIPTS_ONLY: &str = "scripts:x@";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    Healthy,
    /// One master is stopped by SIGSTOP during a turn. The kernel still takes connections and
    /// requests for it, but the master does not answer. Contenders start before it is stopped.
    Stopped,
    /// The answers of one master come this much later. Requests reach it without a delay.
    Late(Duration),
    /// The round trip to every master takes this much longer, half of it in each direction.
    Network(Duration),
}

impl Condition {
    /// Whether a round trip to the last master takes longer than it does on loopback.
    pub(crate) fn is_far_away(self) -> bool {
        self.delays().is_some()
    }

    fn delays(self) -> Option<Delays> {
        match self {
            Self::Healthy | Self::Stopped => None,
            Self::Late(delay) => Some(Delays { requests: Duration::ZERO, answers: delay }),
            Self::Network(round_trip) => {
                Some(Delays { requests: round_trip / 2, answers: round_trip / 2 })
            }
        }
    }

    /// Whether the master with this index is behind the network.
    fn is_far(self, index: usize) -> bool {
        match self {
            Self::Healthy | Self::Stopped => false,
            Self::Late(_) => index == MASTERS - 1,
            Self::Network(_) => true,
        }
    }
}

/// The path of the module, if it lies beside this program. The masters then load it.
pub(crate) fn module() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.with_file_name("libredlock_module.so");
    beside.exists().then_some(beside)
}

/// The Redis masters. They write nothing to disk.
pub(crate) struct Masters {
    condition: Condition,
    /// The processes, and the addresses at which contenders reach them.
    servers: Vec<(Process, SocketAddr)>,
    network: Option<Process>,
}

impl Masters {
    pub(crate) async fn start(condition: Condition, scratch: &TempDir) -> Result<Self, String> {
        // `free_address` may return the same address twice, so a set collects them.
        let mut addresses = BTreeSet::new();
        while addresses.len() < 2 * MASTERS {
            addresses.insert(free_address()?);
        }
        let addresses: Vec<_> = addresses.into_iter().collect();
        let (near, far) = addresses.split_at(MASTERS);
        let is_far = |index: &usize| condition.is_far(*index);
        let ways = (0..MASTERS).filter(is_far).map(|index| (far[index], near[index]));
        let network =
            condition.delays().map(|delays| network::spawn(ways, delays, scratch)).transpose()?;
        let mut masters = Self { condition, servers: Vec::with_capacity(MASTERS), network };
        for (index, &address) in near.iter().enumerate() {
            let mut process = start_master(index, address, scratch).await?;
            let reached = if is_far(&index) { far[index] } else { address };
            wait_until(&mut process, READY_WITHIN, async || {
                ping(&mut connect(reached).await?).await
            })
            .await?;
            masters.servers.push((process, reached));
        }
        Ok(masters)
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.servers.iter().map(|&(_, address)| address)
    }

    /// Begins the condition. Call this when the contender is ready, before its load starts. End the
    /// turn when the figures are taken.
    pub(crate) fn begin_turn(&self) -> Result<Turn<'_>, String> {
        let stopped = (self.condition == Condition::Stopped).then(|| self.last());
        Ok(Turn { stopped: stopped.map(Stopped::stop).into_iter().collect::<Result<_, _>>()? })
    }

    /// Stops a majority of the masters. They continue when the turn ends.
    pub(crate) fn stop_majority(&self) -> Result<Turn<'_>, String> {
        let majority = self.servers.iter().take(MASTERS / 2 + 1);
        Ok(Turn { stopped: majority.map(Stopped::stop).collect::<Result<_, _>>()? })
    }

    /// The median round trip of a PING to the last master, on an idle system. Every condition that
    /// delays a master applies to the last one. A report divides by this figure, not by the
    /// configured delay.
    pub(crate) async fn round_trip_ms(&self) -> Result<f64, String> {
        let mut stream = connect(self.last().1).await?;
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            let began = Instant::now();
            ping(&mut stream).await?;
            times.push(millis(began.elapsed()));
        }
        Ok(median(times))
    }

    /// The resident memory of all masters together, in bytes.
    pub(crate) fn memory(&self) -> Result<f64, String> {
        self.servers.iter().map(|(process, _)| Ok(process.memory()?.now)).sum()
    }

    fn last(&self) -> &(Process, SocketAddr) {
        self.servers.last().expect("there are always masters")
    }

    pub(crate) fn cpu(&self) -> Result<MastersCpu, String> {
        Ok(MastersCpu {
            masters: self.servers.iter().map(|(process, _)| process.cpu()).sum::<Result<_, _>>()?,
            network: self.network.as_ref().map_or(Ok(Duration::ZERO), Process::cpu)?,
        })
    }
}

/// A turn. The masters keep the condition while this value lives.
#[must_use = "the condition ends with it"]
pub(crate) struct Turn<'a> {
    stopped: Vec<Stopped<'a>>,
}

impl Turn<'_> {
    /// Ends the condition. Returns when all masters answer again.
    pub(crate) async fn end(self) -> Result<(), String> {
        for stopped in self.stopped {
            let address = stopped.master.1;
            drop(stopped);
            let answer = async { ping(&mut connect(address).await?).await };
            let answer = tokio::time::timeout(READY_WITHIN, answer).await;
            answer.map_err(|_| {
                format!(
                    "the master at {address} was stopped and does not answer {READY_WITHIN:?} later"
                )
            })??;
        }
        Ok(())
    }
}

/// A stopped master. It continues when this value is dropped.
struct Stopped<'a> {
    master: &'a (Process, SocketAddr),
}

impl<'a> Stopped<'a> {
    fn stop(master: &'a (Process, SocketAddr)) -> Result<Self, String> {
        let (process, address) = master;
        let fault = |what: &str| format!("the master at {address} cannot be stopped: {what}");
        kill_process(process.id(), Signal::STOP).map_err(|error| fault(&error.to_string()))?;
        let stopped = Self { master };
        // The signal takes effect some time after it was sent, so this waits for the stop. NOWAIT:
        // if the process ends instead, its owner must still be able to learn that.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(process.id()), options)
            .map_err(|error| fault(&error.to_string()))?;
        match status.is_some_and(|status| status.stopped()) {
            true => Ok(stopped),
            false => Err(fault("it has ended")),
        }
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        // This fails only if the process has ended.
        let _ = kill_process(self.master.0.id(), Signal::CONT);
    }
}

async fn start_master(
    index: usize,
    address: SocketAddr,
    scratch: &TempDir,
) -> Result<Process, String> {
    let module = module().and_then(|path| path.into_os_string().into_string().ok());
    let port = address.port().to_string();
    let bind = address.ip().to_string();
    let args = ["--port", &port, "--bind", &bind, "--save", "", "--appendonly", "no"];
    let load: Vec<_> =
        module.as_deref().into_iter().flat_map(|path| ["--loadmodule", path]).collect();
    let args = [&args[..], &load].concat();
    let mut process =
        Process::spawn(&format!("redis-{}", index + 1), Path::new("redis-server"), &args, scratch)?;
    wait_until(&mut process, READY_WITHIN, async || ping(&mut connect(address).await?).await)
        .await?;
    if module.is_some() {
        let user = "ACL SETUSER scripts on >x ~* &* +@all -redlock.call";
        command(&mut connect(address).await?, user, "+OK").await?;
    }
    Ok(process)
}

async fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(address).await;
    let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
    stream.map_err(|error| format!("cannot connect to a master at {address}: {error}"))
}

/// The command is written by hand, because the overhead of a client library would count as part of
/// the round trip.
async fn command(stream: &mut TcpStream, line: &str, expected: &str) -> Result<(), String> {
    let mut answer = vec![0; expected.len() + 2];
    let io = async {
        stream.write_all(format!("{line}\r\n").as_bytes()).await?;
        stream.read_exact(&mut answer).await
    };
    io.await.map_err(|error| format!("{line}: {error}"))?;
    let is_expected = answer.strip_suffix(b"\r\n") == Some(expected.as_bytes());
    is_expected
        .then_some(())
        .ok_or_else(|| format!("{line} is answered with {}", answer.escape_ascii()))
}

async fn ping(stream: &mut TcpStream) -> Result<(), String> {
    command(stream, "PING", "+PONG").await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::scratch;

    /// Longer than a running master needs to answer.
    const SILENCE: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn a_stopped_master_is_silent_until_the_turn_ends() {
        let scratch = scratch().unwrap();
        let masters = Masters::start(Condition::Stopped, &scratch).await.unwrap();
        let addresses: Vec<_> = masters.addresses().collect();
        let (stopped, others) = addresses.split_last().unwrap();
        let mut stream = connect(*stopped).await.unwrap();
        ping(&mut stream).await.unwrap();

        let turn = masters.begin_turn().unwrap();
        for &other in others {
            ping(&mut connect(other).await.unwrap()).await.unwrap();
        }
        let mut answer = Box::pin(ping(&mut stream));
        assert!(tokio::time::timeout(SILENCE, &mut answer).await.is_err());
        turn.end().await.unwrap();
        answer.await.unwrap();

        // A turn that is dropped, as after an interrupt, ends the condition in the same way. In the
        // end no master is left running.
        drop(masters.begin_turn().unwrap());
        ping(&mut connect(*stopped).await.unwrap()).await.unwrap();
        let servers: Vec<_> =
            masters.servers.iter().map(|(process, _)| format!("/proc/{}", process.id())).collect();
        drop(masters);
        assert!(!servers.iter().any(|server| Path::new(server).exists()));
    }
}

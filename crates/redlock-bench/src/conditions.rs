//! The masters, and the conditions under which they are measured: as they are, one of them stopped, one of them late,
//! or all of them behind a network.
//!
//! The one is always the last. Contenders and load stay where they are, only the way to the masters changes; nothing in
//! between parses or answers anything. What a delay comes to is measured, and figures are compared with that.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::network::{Delays, Network};
use crate::servers::{MastersCpu, Process, READY_WITHIN, Scratch, free_address, wait_until};

/// Masters in every run: the smallest number of which two may fail.
pub(crate) const MASTERS: usize = 5;
/// Round trips of which the median is taken.
const ROUND_TRIPS: usize = 21;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    Healthy,
    /// One does not answer while a turn lasts, but takes connections and requests: it is stopped by SIGSTOP. Contenders
    /// are started while it answers.
    Stopped,
    /// One answers this much later; requests reach it at once.
    Late(Duration),
    /// The round trip to all of them takes this much longer, half of it on each way.
    Network(Duration),
}

impl Condition {
    /// Whether masters can be started so. The error says what is missing.
    pub(crate) fn available(self) -> Result<(), String> {
        match self {
            Self::Healthy | Self::Stopped => Ok(()),
            Self::Late(_) | Self::Network(_) => Network::available(),
        }
    }

    fn delays(self) -> Option<Delays> {
        match self {
            Self::Healthy | Self::Stopped => None,
            Self::Late(delay) => Some(Delays { requests: Duration::ZERO, answers: delay }),
            Self::Network(round_trip) => Some(Delays { requests: round_trip / 2, answers: round_trip / 2 }),
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

/// The module for masters, where it lies beside this program: then they have it.
pub(crate) fn module() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.with_file_name("libredlock_module.so");
    beside.exists().then_some(beside)
}

/// The login of who may not use the module.
pub(crate) const SCRIPTS_ONLY: &str = "scripts:x@";

/// The Redis masters, which keep everything in memory.
pub(crate) struct Masters {
    condition: Condition,
    /// In the order in which they are dropped: servers before the network they listen on.
    servers: Vec<(Process, SocketAddr)>,
    network: Option<Network>,
}

impl Masters {
    pub(crate) async fn start(condition: Condition, scratch: &Scratch) -> Result<Self, String> {
        Self::start_with(condition, &[], scratch).await
    }

    /// With more options for redis-server.
    pub(crate) async fn start_with(condition: Condition, more: &[&str], scratch: &Scratch) -> Result<Self, String> {
        // The same one may be free twice.
        let mut ports = BTreeSet::new();
        while ports.len() < MASTERS {
            ports.insert(free_address()?.port());
        }
        let ports: Vec<_> = ports.into_iter().collect();
        let network = condition.delays().map(|delays| Network::start(&ports, delays)).transpose()?;
        let module = module().and_then(|path| path.into_os_string().into_string().ok());
        let mut masters = Self { condition, servers: Vec::with_capacity(MASTERS), network };
        for (index, port) in ports.into_iter().enumerate() {
            let (bind, reached) = match &masters.network {
                Some(network) if condition.is_far(index) => (network.near(), network.far()),
                _ => (Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST),
            };
            let (bind, port_text) = (bind.to_string(), port.to_string());
            let args =
                ["--port", &port_text, "--bind", &bind, "--protected-mode", "no", "--save", "", "--appendonly", "no"];
            let address = SocketAddr::new(IpAddr::V4(reached), port);
            let name = format!("redis-{}", index + 1);
            let load: Vec<_> = module.as_deref().into_iter().flat_map(|path| ["--loadmodule", path]).collect();
            let args = [&args[..], &load, more].concat();
            let mut process = Process::spawn(&name, Path::new("redis-server"), &args, scratch)?;
            wait_until(&mut process, READY_WITHIN, async || Wire::open(address).await?.ping().await).await?;
            if module.is_some() {
                Wire::open(address).await?.add_who_may_run_scripts_only().await?;
            }
            masters.servers.push((process, address));
        }
        Ok(masters)
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.servers.iter().map(|&(_, address)| address)
    }

    /// To be called when the contender is ready and before its load starts, and ended when its figures are taken.
    pub(crate) fn begin_turn(&self) -> Result<Turn<'_>, String> {
        let stopped = match self.condition {
            Condition::Healthy | Condition::Late(_) | Condition::Network(_) => None,
            Condition::Stopped => Some(Stopped::stop(self.last())?),
        };
        Ok(Turn { stopped })
    }

    /// The median round trip of a PING to the last master, the one to which every condition applies, while no other work
    /// goes on. A report divides by this one and not by what the condition asked for.
    pub(crate) async fn measured_round_trip(&self) -> Result<Duration, String> {
        round_trip(self.last().1).await
    }

    fn last(&self) -> &(Process, SocketAddr) {
        self.servers.last().expect("there are always masters")
    }

    pub(crate) fn cpu(&self) -> Result<MastersCpu, String> {
        Ok(MastersCpu {
            masters: self.servers.iter().map(|(process, _)| process.cpu()).sum::<Result<_, _>>()?,
            network: self.network.as_ref().map_or(Ok(Duration::ZERO), Network::cpu)?,
        })
    }
}

/// The masters are as the condition wants them for as long as this lives.
#[must_use = "the condition ends with it"]
pub(crate) struct Turn<'a> {
    stopped: Option<Stopped<'a>>,
}

impl Turn<'_> {
    /// Returns when all masters answer again.
    pub(crate) async fn end(self) -> Result<(), String> {
        let Some(stopped) = self.stopped else { return Ok(()) };
        let address = stopped.master.1;
        drop(stopped);
        let answer = async { Wire::open(address).await?.ping().await };
        match tokio::time::timeout(READY_WITHIN, answer).await {
            Ok(result) => result,
            Err(_) => Err(format!("the master at {address} was stopped and does not answer {READY_WITHIN:?} later")),
        }
    }
}

/// Goes on when dropped.
struct Stopped<'a> {
    master: &'a (Process, SocketAddr),
}

impl<'a> Stopped<'a> {
    fn stop(master: &'a (Process, SocketAddr)) -> Result<Self, String> {
        let (process, address) = master;
        let fault = |what: &str| format!("the master at {address} cannot be stopped: {what}");
        kill_process(process.id(), Signal::STOP).map_err(|error| fault(&error.to_string()))?;
        let stopped = Self { master };
        // The signal takes effect later than it is sent. NOWAIT leaves an end to whoever owns the process.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(process.id()), options).map_err(|error| fault(&error.to_string()))?;
        match status.is_some_and(|status| status.stopped()) {
            true => Ok(stopped),
            false => Err(fault("it has ended")),
        }
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        // Fails only when it has ended.
        let _ = kill_process(self.master.0.id(), Signal::CONT);
    }
}

/// A connection to a master that carries nothing but PING.
struct Wire {
    stream: TcpStream,
    address: SocketAddr,
}

impl Wire {
    async fn open(address: SocketAddr) -> Result<Self, String> {
        let stream = TcpStream::connect(address).await;
        let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
        Ok(Self { stream: stream.map_err(|error| format!("PING at {address}: {error}"))?, address })
    }

    async fn add_who_may_run_scripts_only(&mut self) -> Result<(), String> {
        let mut answer = [0; 5];
        let io = async {
            self.stream.write_all(b"ACL SETUSER scripts on >x ~* &* +@all -redlock.call\r\n").await?;
            self.stream.read_exact(&mut answer).await
        };
        let done = io.await.map_err(|error| format!("ACL at {}: {error}", self.address));
        done.and_then(
            |_| if answer == *b"+OK\r\n" { Ok(()) } else { Err(format!("ACL at {} is refused", self.address)) },
        )
    }

    async fn ping(&mut self) -> Result<(), String> {
        let mut answer = [0; 7];
        let io = async {
            self.stream.write_all(b"PING\r\n").await?;
            self.stream.read_exact(&mut answer).await
        };
        io.await.map_err(|error| format!("PING at {}: {error}", self.address))?;
        match &answer {
            b"+PONG\r\n" => Ok(()),
            other => Err(format!("PING at {} is answered with {:?}", self.address, other.escape_ascii().to_string())),
        }
    }
}

async fn round_trip(master: SocketAddr) -> Result<Duration, String> {
    let mut wire = Wire::open(master).await?;
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let began = Instant::now();
        wire.ping().await?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUND_TRIPS / 2])
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write as _};

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    /// More than a stopped master could take if it answered.
    const SILENCE: Duration = Duration::from_millis(300);

    /// `None`, and a line that says so, where this machine does not allow the condition.
    async fn start(condition: Condition, scratch: &Scratch) -> Option<Masters> {
        if let Err(error) = condition.available() {
            // The test runner swallows what the macros print.
            writeln!(io::stderr(), "SKIPPED {condition:?}: {error}").unwrap();
            return None;
        }
        Some(Masters::start(condition, scratch).await.unwrap())
    }

    fn addresses(masters: &Masters) -> Vec<SocketAddr> {
        masters.addresses().collect()
    }

    /// Without the delay a PING takes well below a millisecond.
    async fn fastest_ping(address: SocketAddr) -> Duration {
        let mut wire = Wire::open(address).await.unwrap();
        let mut fastest = Duration::MAX;
        for _ in 0..ROUND_TRIPS {
            let began = Instant::now();
            wire.ping().await.unwrap();
            fastest = fastest.min(began.elapsed());
        }
        fastest
    }

    #[tokio::test]
    async fn one_master_is_late_and_the_others_are_not() {
        let scratch = Scratch::create().unwrap();
        let Some(masters) = start(Condition::Late(50 * MS), &scratch).await else { return };
        let addresses = addresses(&masters);
        let (late, others) = addresses.split_last().unwrap();
        assert!(fastest_ping(*late).await >= 50 * MS);
        for &other in others {
            assert!(fastest_ping(other).await < 25 * MS);
        }
        let measured = masters.measured_round_trip().await.unwrap();
        assert!(measured >= 50 * MS && measured < 150 * MS, "{measured:?}");
    }

    #[tokio::test]
    async fn all_masters_are_a_round_trip_away() {
        for round_trip in [10 * MS, MS] {
            let scratch = Scratch::create().unwrap();
            let Some(masters) = start(Condition::Network(round_trip), &scratch).await else { return };
            for address in masters.addresses() {
                let fastest = fastest_ping(address).await;
                assert!(fastest >= round_trip && fastest < 3 * round_trip, "{fastest:?} instead of {round_trip:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_network_carries_much_at_a_time() {
        let scratch = Scratch::create().unwrap();
        let Some(masters) = start(Condition::Network(MS), &scratch).await else { return };
        let (payload, address) = ("x".repeat(4 << 20), masters.addresses().next().unwrap());
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("*2\r\n$4\r\nECHO\r\n${}\r\n{payload}\r\n", payload.len()).as_bytes()).await.unwrap();
        let mut answer = vec![0; format!("${}\r\n{payload}\r\n", payload.len()).len()];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer.ends_with(format!("{payload}\r\n").as_bytes()));
        assert!(masters.cpu().unwrap().network > Duration::ZERO);
    }

    #[tokio::test]
    async fn a_stopped_master_is_silent_until_the_turn_ends() {
        let scratch = Scratch::create().unwrap();
        let masters = Masters::start(Condition::Stopped, &scratch).await.unwrap();
        let addresses = addresses(&masters);
        let (stopped, others) = addresses.split_last().unwrap();
        let mut wire = Wire::open(*stopped).await.unwrap();
        wire.ping().await.unwrap();

        let turn = masters.begin_turn().unwrap();
        for &other in others {
            Wire::open(other).await.unwrap().ping().await.unwrap();
        }
        let mut answer = Box::pin(wire.ping());
        assert!(tokio::time::timeout(SILENCE, &mut answer).await.is_err());
        turn.end().await.unwrap();
        answer.await.unwrap();

        // A turn that is given up, as by an interrupt, ends the same.
        drop(masters.begin_turn().unwrap());
        Wire::open(*stopped).await.unwrap().ping().await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_left_of_masters_and_their_network() {
        let scratch = Scratch::create().unwrap();
        let Some(masters) = start(Condition::Network(MS), &scratch).await else { return };
        let servers: Vec<_> = masters.servers.iter().map(|(process, _)| format!("/proc/{}", process.id())).collect();
        let near = masters.network.as_ref().unwrap().near();
        let is_here = || std::net::TcpListener::bind((near, 0)).is_ok();
        // The very process that was started became the server, so its accounting is the server's.
        for server in &servers {
            assert_eq!(std::fs::read_to_string(format!("{server}/comm")).unwrap(), "redis-server\n");
        }
        assert!(is_here());
        drop(masters);
        assert!(!is_here());
        assert!(!servers.iter().any(|server| Path::new(server).exists()));
    }
}

//! A network with a delay, for masters that are to be late or far away.
//!
//! The kernel's own means, netem, is missing in many kernels, those of small virtual machines among them, and wants
//! namespaces that somebody has to clean up. So the delay is made here: what the kernel sends into a TUN device is held
//! back, and given to the kernel again with source and destination exchanged. A server that listens on the near address
//! is reached by the far one, and both ends are the kernel's real TCP:
//!
//! | | sent as | arrives as |
//! | --- | --- | --- |
//! | request | near:c → far:s | far:c → near:s |
//! | answer | near:s → far:c | far:s → near:c |
//!
//! The exchange leaves every checksum as it was. A delay is constant and packets keep their order. A packet is never
//! early; how late it is beyond that, a measured round trip says.
//!
//! Nothing needs to be removed: the kernel takes the device away, with its address and route, when this program ends,
//! however it ends. The CPU time of the threads in here is no contender's and not the load's; `Accounts` leaves it out.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, setpriority_process};
use rustix::thread::{gettid, set_current_timer_slack};
use tun_rs::{DeviceBuilder, InterruptEvent, SyncDevice};

use crate::servers::cpu_of;

/// 198.18.0.0/15 is set aside for benchmarks of networks (RFC 2544); every network takes a /30 of it.
const RANGE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const PREFIX: u8 = 30;
const NETWORKS: u32 = 1 << (PREFIX - 15);
/// Packets that may wait in the device for the reader. A lost one would cost TCP 200 ms.
const QUEUE: u32 = 10_000;
const MTU: u16 = 1500;
/// The highest priority but real time: a packet that is due must not queue behind the busy contenders.
const NICE: i32 = -20;

/// What is held back, and how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delays {
    pub(crate) requests: Duration,
    pub(crate) answers: Duration,
}

/// Ends when dropped.
pub(crate) struct Network {
    near: Ipv4Addr,
    far: Ipv4Addr,
    stop: Arc<InterruptEvent>,
    threads: Vec<(Pid, JoinHandle<()>)>,
}

/// A packet, and when it is due.
type Held = (Instant, Vec<u8>);

impl Network {
    /// Tries one out. The error says what is missing.
    pub(crate) fn available() -> Result<(), String> {
        Self::start(&[], Delays { requests: Duration::ZERO, answers: Duration::ZERO }).map(drop)
    }

    /// What comes from one of the servers' ports is an answer.
    pub(crate) fn start(servers: &[u16], delays: Delays) -> Result<Self, String> {
        let (near, far) = free_pair()?;
        let device = DeviceBuilder::new()
            .name("redlock%d")
            .ipv4(near, PREFIX, None)
            .mtu(MTU)
            .with(|options| {
                options.tx_queue_len(QUEUE);
            })
            .build_sync()
            .map_err(|error| {
                format!("cannot make a network device: {error}; it takes /dev/net/tun and CAP_NET_ADMIN")
            })?;
        let device = Arc::new(device);
        let stop = Arc::new(InterruptEvent::new().map_err(|error| format!("cannot make a pipe: {error}"))?);
        let mut network = Self { near, far, stop, threads: Vec::new() };
        let (requests, due_requests) = mpsc::channel();
        let (answers, due_answers) = mpsc::channel();
        let remotes = [(requests, delays.requests), (answers, delays.answers)];
        let reader = Reader { device: device.clone(), near, far, servers: servers.to_vec(), remotes };
        let stop = network.stop.clone();
        network.spawn(move || report("read from", reader.run(&stop)))?;
        for due in [due_requests, due_answers] {
            let device = device.clone();
            network.spawn(move || report("write to", deliver(&device, &due)))?;
        }
        Ok(network)
    }

    fn spawn(&mut self, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
        let (ready, begun) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("network".into()).spawn(move || {
            let prepared = prepare();
            let failed = prepared.is_err();
            // A caller waits for this answer.
            let _ = ready.send(prepared);
            if !failed {
                work();
            }
        });
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        let id = begun.recv().map_err(|_| "a thread of the network ended at once")??;
        self.threads.push((id, thread));
        Ok(())
    }

    /// Where a server has to listen.
    pub(crate) fn near(&self) -> Ipv4Addr {
        self.near
    }

    /// Where it is reached, with the delays.
    pub(crate) fn far(&self) -> Ipv4Addr {
        self.far
    }

    /// The CPU time that the delay has cost so far.
    pub(crate) fn cpu(&self) -> Result<Duration, String> {
        self.threads.iter().map(|(id, _)| cpu_of(&format!("self/task/{}", id.as_raw_nonzero()))).sum()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The reader ends and takes the senders with it; the others end when nothing is left to be delivered.
        let _ = self.stop.trigger();
        for (_, thread) in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// On Linux both hold for the calling thread only.
fn prepare() -> Result<Pid, String> {
    setpriority_process(None, NICE).map_err(|error| {
        format!("cannot give the network's threads the priority {NICE}: {error}; it takes CAP_SYS_NICE")
    })?;
    // The kernel may otherwise be 50 µs late on purpose.
    set_current_timer_slack(std::num::NonZeroU64::new(1))
        .map_err(|error| format!("cannot set a timer's slack: {error}"))?;
    Ok(gettid())
}

/// What has ended a thread for any other reason than `stop` makes the masters silent, which the measurement then reports.
fn report(what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        eprintln!("cannot {what} the network device any more: {error}");
    }
}

/// Two addresses of a /30 that this machine has not got. Those who look at the same time begin at different places.
fn free_pair() -> Result<(Ipv4Addr, Ipv4Addr), String> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(8).wrapping_add(STARTED.fetch_add(1, Ordering::Relaxed));
    (0..NETWORKS)
        .map(|offset| RANGE.to_bits() + (first.wrapping_add(offset) % NETWORKS) * 4)
        .map(|network| (Ipv4Addr::from_bits(network + 1), Ipv4Addr::from_bits(network + 2)))
        // Only an address of this machine can be bound.
        .find(|&(near, far)| [near, far].iter().all(|&address| TcpListener::bind((address, 0)).is_err()))
        .ok_or_else(|| {
            format!("no /{PREFIX} of {RANGE}/15 is free on this machine (or net.ipv4.ip_nonlocal_bind is set)")
        })
}

struct Reader {
    device: Arc<SyncDevice>,
    near: Ipv4Addr,
    far: Ipv4Addr,
    servers: Vec<u16>,
    remotes: [(Sender<Held>, Duration); 2],
}

impl Reader {
    fn run(&self, stop: &InterruptEvent) -> io::Result<()> {
        let mut buffer = [0; MTU as usize];
        loop {
            let length = match self.device.recv_intr(&mut buffer, stop) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            let packet = &mut buffer[..length];
            let Some(sender) = exchange(packet, self.near, self.far) else { continue };
            let (remote, delay) = &self.remotes[usize::from(self.servers.contains(&sender))];
            if remote.send((now + *delay, packet.to_vec())).is_err() {
                return Err(io::Error::other("its writer has ended"));
            }
        }
    }
}

/// Exchanges source and destination of a TCP packet from near to far, and returns the port that sent it. The kernel also
/// sends what nobody asked for, multicasts for instance: `None`.
fn exchange(packet: &mut [u8], near: Ipv4Addr, far: Ipv4Addr) -> Option<u16> {
    const TCP: u8 = 6;
    let (header, _) = packet.split_first_chunk_mut::<20>()?;
    if header[0] >> 4 != 4 || header[9] != TCP || header[12..16] != near.octets() || header[16..20] != far.octets() {
        return None;
    }
    header[12..16].copy_from_slice(&far.octets());
    header[16..20].copy_from_slice(&near.octets());
    let length = usize::from(header[0] & 15) * 4;
    Some(u16::from_be_bytes(*packet.get(length..)?.first_chunk()?))
}

fn deliver(device: &SyncDevice, due: &Receiver<Held>) -> io::Result<()> {
    for (when, packet) in due {
        thread::sleep(when.saturating_duration_since(Instant::now()));
        device.send(&packet)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
    const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);

    fn packet(protocol: u8, source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
        let start = [0x46, 0, 0, 44, 0, 0, 0, 0, 64, protocol, 0, 0];
        [&start[..], &source.octets(), &destination.octets(), &[1; 4], &6379_u16.to_be_bytes(), &[9; 18]].concat()
    }

    #[test]
    fn source_and_destination_are_exchanged_and_the_port_is_behind_the_options() {
        let mut there = packet(6, NEAR, FAR);
        assert_eq!(exchange(&mut there, NEAR, FAR), Some(6379));
        assert_eq!(there, packet(6, FAR, NEAR));
    }

    #[test]
    fn what_is_not_tcp_between_the_two_is_dropped() {
        assert_eq!(exchange(&mut packet(17, NEAR, FAR), NEAR, FAR), None);
        assert_eq!(exchange(&mut packet(6, NEAR, Ipv4Addr::new(224, 0, 0, 22)), NEAR, FAR), None);
        assert_eq!(exchange(&mut packet(6, FAR, NEAR), NEAR, FAR), None);
        assert_eq!(exchange(&mut packet(6, NEAR, FAR)[..24], NEAR, FAR), None);
        assert_eq!(exchange(&mut [], NEAR, FAR), None);
        let mut version_6 = packet(6, NEAR, FAR);
        version_6[0] = 0x66;
        assert_eq!(exchange(&mut version_6, NEAR, FAR), None);
    }
}

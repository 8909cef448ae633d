//! A network with a delay, for late or distant masters. It is a process of this program. It accepts
//! connections for each master and passes on the bytes. Each direction has its own delay.
//!
//! The kernel's own means for this, netem, is missing in many kernels, for example in small virtual
//! machines. The delay here is constant: bytes keep their order and never come early. They may come
//! later, and the measured round trip shows by how much. The network parses nothing. The opening of
//! a connection is not delayed, because contenders keep their connections open.
//!
//! The network is a separate process so that its CPU time counts neither as a contender's nor as
//! the load's.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::setpriority_process;
use rustix::thread::set_current_timer_slack;
use tempfile::TempDir;

use crate::servers::Process;

/// The highest priority below real time. Bytes that are due must not wait behind busy contenders.
const NICE: i32 = -20;
const BUFFER: usize = 64 * 1024;

/// How long requests and answers are delayed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delays {
    pub(crate) requests: Duration,
    pub(crate) answers: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[arg(long)]
    requests_us: u64,
    #[arg(long)]
    answers_us: u64,
    /// Address at which each master is reached, in the masters' order
    #[arg(long)]
    listen: Vec<SocketAddr>,
    #[arg(long)]
    master: Vec<SocketAddr>,
}

/// Starts the network process. It begins to listen soon afterwards.
pub(crate) fn spawn(
    ways: impl Iterator<Item = (SocketAddr, SocketAddr)>,
    delays: Delays,
    scratch: &TempDir,
) -> Result<Process, String> {
    let bench = std::env::current_exe()
        .map_err(|error| format!("cannot find this program's own file: {error}"))?;
    let [requests, answers] =
        [delays.requests, delays.answers].map(|delay| delay.as_micros().to_string());
    let mut args = vec![
        "network".to_owned(),
        "--requests-us".into(),
        requests,
        "--answers-us".into(),
        answers,
    ];
    for (listen, master) in ways {
        args.extend(["--listen".into(), listen.to_string(), "--master".into(), master.to_string()]);
    }
    Process::spawn("network", Path::new(&bench), &args, scratch)
}

/// Runs the network until the process is killed.
pub(crate) fn serve(options: &Options) -> Result<(), String> {
    // The two settings that follow apply to this thread, and the threads that it starts later
    // inherit them.
    if let Err(error) = setpriority_process(None, NICE) {
        eprintln!("without the priority {NICE}, which takes CAP_SYS_NICE: {error}");
    }
    // By default the kernel may wake a thread up to 50 µs late on purpose.
    set_current_timer_slack(std::num::NonZeroU64::new(1))
        .map_err(|error| format!("a timer's slack: {error}"))?;
    let [requests, answers] =
        [options.requests_us, options.answers_us].map(Duration::from_micros).map(Way::start);
    let mut listeners = Vec::new();
    for (listen, &master) in options.listen.iter().zip(&options.master) {
        let listener = TcpListener::bind(listen)
            .map_err(|error| format!("cannot listen on {listen}: {error}"))?;
        let requests = requests.clone();
        let answers = answers.clone();
        listeners.push(thread::spawn(move || -> io::Result<()> {
            for client in listener.incoming() {
                let client = client?;
                let server = TcpStream::connect(master)?;
                requests.pass_on(client.try_clone()?, server.try_clone()?)?;
                answers.pass_on(server, client)?;
            }
            Ok(())
        }));
    }
    for listener in listeners {
        listener.join().map_err(|_| "a thread panicked")?.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// When the bytes are due, where they go, and the bytes. No bytes mean the end of the connection.
type Held = (Instant, Arc<TcpStream>, Vec<u8>);

/// One direction of all connections. All of them have the same delay, so one thread can deliver in
/// the order of arrival. Several threads would wake at the same time, and delay one another.
#[derive(Clone)]
struct Way {
    delay: Duration,
    sender: Sender<Held>,
}

impl Way {
    fn start(delay: Duration) -> Self {
        let (sender, due) = mpsc::channel::<Held>();
        thread::spawn(move || {
            for (when, to, bytes) in due {
                thread::sleep(when.saturating_duration_since(Instant::now()));
                if bytes.is_empty() || (&*to).write_all(&bytes).is_err() {
                    // This fails only if the other direction has already ended the connection.
                    let _ = to.shutdown(Shutdown::Both);
                }
            }
        });
        Self { delay, sender }
    }

    fn pass_on(&self, mut from: TcpStream, to: TcpStream) -> io::Result<()> {
        to.set_nodelay(true)?;
        let way = self.clone();
        let to = Arc::new(to);
        thread::spawn(move || {
            let mut buffer = vec![0; BUFFER];
            loop {
                let length = from.read(&mut buffer).unwrap_or(0);
                let held = (Instant::now() + way.delay, to.clone(), buffer[..length].to_vec());
                if way.sender.send(held).is_err() || length == 0 {
                    return;
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes pass through the network to a server that sends each one back.
    #[test]
    fn bytes_arrive_whole_in_order_and_never_early() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            io::copy(&mut stream.try_clone().unwrap(), &mut stream)
        });
        let near = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(near.local_addr().unwrap()).unwrap();
        let middle = near.accept().unwrap().0;
        let server = TcpStream::connect(server).unwrap();
        let delay = Duration::from_millis(20);
        Way::start(delay)
            .pass_on(middle.try_clone().unwrap(), server.try_clone().unwrap())
            .unwrap();
        Way::start(delay).pass_on(server, middle).unwrap();

        let sent: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
        let mut received = vec![0; sent.len()];
        let began = Instant::now();
        let data = sent.clone();
        let mut sender = client.try_clone().unwrap();
        let sending = thread::spawn(move || sender.write_all(&data));
        client.read_exact(&mut received[..1]).unwrap();
        assert!(began.elapsed() >= 2 * delay);
        client.read_exact(&mut received[1..]).unwrap();
        assert!(received == sent && sending.join().unwrap().is_ok());
    }
}

//! The floor: what five masters cost at least, however a gateway is written. It is a hand-written
//! Redis client for SET NX PX and compare-and-delete only. It has one connection for each master,
//! and one task owns each connection.
//!
//! A request puts its command into the buffer of every node. A node's task writes its whole buffer
//! at once and reads the replies in order. The number of calls in flight has no limit. A round has
//! one count of votes and one wake-up, at the vote that decides. There are no time-outs, no
//! reconnects and no other safety: any error ends the process.
//!
//! Two alternatives were tried on two cores, in turns. The floor uses the better of each pair:
//!
//! - One thread instead of two. Two threads are not faster and cost a tenth more CPU.
//! - A node's task writes after all ready requests, instead of at once. So each write carries more
//!   commands, which saves some CPU here and on the masters.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::Write as _;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

const BUFFER: usize = 64 * 1024;

#[derive(Default)]
pub(super) struct Floor {
    nodes: Vec<Arc<Node>>,
    release_sha: String,
}

impl Floor {
    pub(super) async fn connect(masters: &[SocketAddr], release: &str) -> Result<Self, String> {
        let mut nodes = Vec::with_capacity(masters.len());
        let mut release_sha = String::new();
        for &master in masters {
            let start = async {
                let mut stream = TcpStream::connect(master).await?;
                stream.set_nodelay(true)?;
                stream.write_all(&command(&["SCRIPT", "LOAD", release])).await?;
                let mut reply = [0; 47];
                stream.read_exact(&mut reply).await?;
                Ok((stream, reply))
            };
            let (stream, reply) =
                start.await.map_err(|error: std::io::Error| format!("{master}: {error}"))?;
            release_sha = String::from_utf8_lossy(&reply[5..45]).into_owned();
            let node = Arc::new(Node::default());
            nodes.push(node.clone());
            tokio::spawn(async move {
                let error = Worker::new(&node, stream).run().await;
                eprintln!("{master}: {error}");
                std::process::exit(1);
            });
        }
        Ok(Self { nodes, release_sha })
    }

    pub(super) async fn acquire(&self, key: &str, token: &str, ttl_ms: u64) -> usize {
        self.ask_all(&command(&["SET", key, token, "NX", "PX", &ttl_ms.to_string()])).await
    }

    pub(super) async fn release(&self, key: &str, token: &str) -> usize {
        self.ask_all(&command(&["EVALSHA", &self.release_sha, "1", key, token])).await
    }

    /// Asks all nodes, and returns the number of granting votes when the votes decide.
    async fn ask_all(&self, command: &[u8]) -> usize {
        let quorum = self.nodes.len() / 2 + 1;
        let round = Arc::new(Round(Mutex::new(Votes {
            granted: 0,
            to_grant: quorum,
            to_refuse: self.nodes.len() + 1 - quorum,
            waker: None,
        })));
        for node in &self.nodes {
            node.ask(command, &round);
        }
        poll_fn(|context| round.poll(context)).await
    }
}

/// One question to all nodes, with the votes so far.
struct Round(Mutex<Votes>);

struct Votes {
    granted: usize,
    to_grant: usize,
    to_refuse: usize,
    waker: Option<Waker>,
}

impl Round {
    fn vote(&self, granted: bool) {
        let mut votes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if votes.to_grant == 0 || votes.to_refuse == 0 {
            return;
        }
        match granted {
            true => (votes.granted, votes.to_grant) = (votes.granted + 1, votes.to_grant - 1),
            false => votes.to_refuse -= 1,
        }
        if votes.to_grant == 0 || votes.to_refuse == 0 {
            let waker = votes.waker.take();
            drop(votes);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<usize> {
        let mut votes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if votes.to_grant == 0 || votes.to_refuse == 0 {
            return Poll::Ready(votes.granted);
        }
        votes.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// The commands that are to be sent to one master.
#[derive(Default)]
struct Node(Mutex<Pending>);

#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    rounds: Vec<Arc<Round>>,
    /// Wakes the worker. Set while the worker has taken all commands and waits for more.
    waker: Option<Waker>,
}

impl Node {
    fn ask(&self, command: &[u8], round: &Arc<Round>) {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.bytes.extend_from_slice(command);
        pending.rounds.push(round.clone());
        let waker = pending.waker.take();
        drop(pending);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The connection to one master.
struct Worker<'a> {
    node: &'a Node,
    stream: TcpStream,
    sending: Vec<u8>,
    sent: usize,
    /// The rounds whose replies are missing, in the order in which the replies will come.
    asked: VecDeque<Arc<Round>>,
    received: Box<[u8]>,
    filled: usize,
}

impl<'a> Worker<'a> {
    fn new(node: &'a Node, stream: TcpStream) -> Self {
        let received = vec![0; BUFFER].into();
        Self {
            node,
            stream,
            sending: Vec::new(),
            sent: 0,
            asked: VecDeque::new(),
            received,
            filled: 0,
        }
    }

    /// Runs until an error occurs, and returns the error.
    async fn run(mut self) -> String {
        loop {
            let mut woken = false;
            let work = poll_fn(|context| match std::mem::replace(&mut woken, true) {
                true => Poll::Ready(None),
                false => self.poll(context).map(Some),
            });
            if let Some(error) = work.await {
                return error;
            }
            // All tasks that are ready run first, so that one write carries all their commands.
            tokio::task::yield_now().await;
        }
    }

    /// Writes and reads. Ready only with an error.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<String> {
        if let Poll::Ready(Err(error)) = self.poll_write(context) {
            return Poll::Ready(error.to_string());
        }
        loop {
            let mut free = ReadBuf::new(&mut self.received[self.filled..]);
            match Pin::new(&mut self.stream).poll_read(context, &mut free) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(error.to_string()),
                Poll::Ready(Ok(())) if free.filled().is_empty() => {
                    return Poll::Ready("closed".into());
                }
                Poll::Ready(Ok(())) => self.filled += free.filled().len(),
            }
            if let Err(reply) = self.count() {
                return Poll::Ready(format!("replied {reply:?}"));
            }
        }
    }

    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        loop {
            while self.sent < self.sending.len() {
                let written =
                    Pin::new(&mut self.stream).poll_write(context, &self.sending[self.sent..]);
                self.sent += std::task::ready!(written)?;
            }
            self.sending.clear();
            self.sent = 0;
            let mut pending = self.node.0.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.bytes.is_empty() {
                pending.waker.get_or_insert_with(|| context.waker().clone());
                return Poll::Ready(Ok(()));
            }
            std::mem::swap(&mut self.sending, &mut pending.bytes);
            self.asked.extend(pending.rounds.drain(..));
        }
    }

    /// Counts the votes in all complete replies. The reply to SET is +OK or $-1. The reply to the
    /// script is :1 or :0.
    fn count(&mut self) -> Result<(), String> {
        let mut rest = &self.received[..self.filled];
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let (reply, behind) = rest.split_at(end + 1);
            let granted = match reply {
                b"+OK\r\n" | b":1\r\n" => true,
                b"$-1\r\n" | b":0\r\n" => false,
                other => return Err(other.escape_ascii().to_string()),
            };
            self.asked.pop_front().ok_or("a reply without a command")?.vote(granted);
            rest = behind;
        }
        let left = rest.len();
        self.received.copy_within(self.filled - left..self.filled, 0);
        self.filled = left;
        Ok(())
    }
}

fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(192);
    write!(bytes, "*{}\r\n", words.len()).expect("a Vec takes everything");
    for word in words {
        write!(bytes, "${}\r\n{word}\r\n", word.len()).expect("a Vec takes everything");
    }
    bytes
}

//! The attacker: a process of its own, so that it can be given less of the CPU than the others and has its own open files.
//! It goes on until it is killed, and says again and again what it got; a look at that before and after a while is the rate.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until};

use super::attacks::{Attack, Manner, line};
use super::requests::{Parts, request};
use crate::http::Connection;

/// Connections that are being opened at the same time; more would fill the listener's backlog.
const OPENING: usize = 64;
/// Before the next try after what was incomplete was refused: who holds places need not come back at once.
const RETURN_AFTER: Duration = Duration::from_secs(2);
/// Before the next try after a connection was not to be had, or a short wait was refused.
const PAUSE: Duration = Duration::from_millis(50);
const TELL_EVERY: Duration = Duration::from_millis(100);
/// The first connection's; the others follow. To have the kernel find a free one among many thousands takes much CPU time.
const FIRST_PORT: u16 = 2000;
const LOCK: &str = "/locks/attack-0";

/// Be the attacker.
#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    #[arg(value_enum)]
    attack: Attack,
    #[arg(long)]
    target: SocketAddr,
    #[arg(long)]
    source: IpAddr,
    #[arg(long)]
    connections: u32,
    #[arg(long, default_value = "")]
    key: String,
    /// Tries per second of all connections together; 0 for as many as possible
    #[arg(long, default_value_t = 0)]
    rate: u32,
}

/// What it has done so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Whether every connection has had its first try.
    pub(super) is_ready: bool,
    /// Connections that hold what they took: a body that is awaited, a place in a line.
    pub(super) holding: u32,
    /// By status, or by what became of the connection.
    pub(super) got: BTreeMap<String, u64>,
}

impl Tally {
    /// The last one in what an attacker printed.
    pub(super) fn last_of(output: &str) -> Option<Self> {
        output.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    /// What was got since then.
    pub(super) fn since(&self, before: &Self) -> BTreeMap<String, u64> {
        let more = self.got.iter().map(|(what, count)| (what.clone(), count - before.got.get(what).unwrap_or(&0)));
        more.filter(|(_, count)| *count > 0).collect()
    }
}

struct Attacker {
    options: Options,
    manner: Manner,
    opening: Semaphore,
    begun: AtomicU32,
    holding: AtomicU32,
    got: Mutex<BTreeMap<String, u64>>,
    /// How much metadata is still allowed.
    metadata: AtomicU32,
}

/// Goes on until it is killed.
pub(crate) async fn attack(options: Options) -> Result<(), String> {
    let manner = options.attack.needs().manner;
    if manner == Manner::Spin {
        println!("{}", serde_json::json!(Tally { is_ready: true, ..Tally::default() }));
        loop {
            std::hint::spin_loop();
        }
    }
    let connections = options.connections;
    let attacker = Arc::new(Attacker {
        options,
        manner,
        opening: Semaphore::new(OPENING),
        begun: AtomicU32::new(0),
        holding: AtomicU32::new(0),
        got: Mutex::default(),
        metadata: AtomicU32::new(4000),
    });
    for number in 0..connections {
        tokio::spawn(attacker.clone().work(number));
    }
    loop {
        let tally = Tally {
            is_ready: attacker.begun.load(Ordering::Relaxed) == connections,
            holding: attacker.holding.load(Ordering::Relaxed),
            got: attacker.got.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        writeln!(std::io::stdout(), "{}", serde_json::json!(tally)).map_err(|error| error.to_string())?;
        sleep(TELL_EVERY).await;
    }
}

impl Attacker {
    async fn work(self: Arc<Self>, number: u32) {
        let mut begun = false;
        let mut begin = || {
            if !std::mem::replace(&mut begun, true) {
                self.begun.fetch_add(1, Ordering::Relaxed);
            }
        };
        let every = Duration::from_secs(1) * self.options.connections / self.options.rate.max(1);
        let mut due = Instant::now();
        let mut port = u16::try_from(number).map_or(0, |number| FIRST_PORT.saturating_add(number));
        loop {
            let opened = {
                let _place = self.opening.acquire().await;
                Connection::open_from((self.options.source, port).into(), self.options.target).await
            };
            let Ok(mut connection) = opened else {
                self.count("not connected");
                begin();
                // Somebody else may have it.
                port = 0;
                sleep(PAUSE).await;
                continue;
            };
            // Ports must not be kept by connections of attackers that were killed.
            let _ = connection.reset_when_dropped();
            let mut granted: Option<(String, String)> = None;
            loop {
                if self.options.rate > 0 {
                    sleep_until(due).await;
                    due = Instant::now().max(due + every);
                }
                let (path, token) = granted.take().unwrap_or_else(|| (new_path(), String::new()));
                let sent = connection.send(&self.request(number, &path, &token)).await;
                if self.manner != Manner::Ask {
                    begin();
                }
                self.holding.fetch_add(1, Ordering::Relaxed);
                let answer = match sent {
                    Ok(()) => connection.answer().await,
                    Err(error) => Err(error),
                };
                self.holding.fetch_sub(1, Ordering::Relaxed);
                begin();
                let Ok(answer) = answer else {
                    self.count("closed");
                    break;
                };
                self.count(&answer.status.to_string());
                granted = self.look_at(answer.status, answer.lock_token).map(|token| (path, token));
                match (self.manner, answer.status) {
                    (Manner::Stay, _) => break,
                    (Manner::Wait, 400..) => sleep(self.pause()).await,
                    _ => {}
                }
            }
            if self.manner != Manner::Ask {
                sleep(self.pause()).await;
            }
        }
    }

    fn count(&self, what: &str) {
        let mut got = self.got.lock().unwrap_or_else(PoisonError::into_inner);
        match got.get_mut(what) {
            Some(count) => *count += 1,
            None => drop(got.insert(what.to_owned(), 1)),
        }
    }

    fn pause(&self) -> Duration {
        if self.options.attack.is_at_lines() { PAUSE } else { RETURN_AFTER }
    }

    /// The token to be given back with the next request.
    fn look_at(&self, status: u16, token: Option<&[u8]>) -> Option<String> {
        if status == 400 && self.options.attack == Attack::FillMetadata {
            self.metadata.store(900, Ordering::Relaxed);
        }
        let token = token.filter(|_| self.options.attack == Attack::Acquire)?;
        Some(String::from_utf8_lossy(token).into_owned())
    }

    fn request(&self, number: u32, path: &str, granted: &str) -> Vec<u8> {
        let key = self.options.key.as_str();
        let ask = |method: &str, path: &str, token: &str, body: &str| request(method, path, Parts { key, token, body });
        let post = |path: &str, body: &str| ask("POST", path, "", body);
        let wait = r#"{"ttl_ms":300000,"wait_ms":25000}"#;
        match self.options.attack {
            Attack::Spin | Attack::Idle => Vec::new(),
            Attack::List => ask("GET", "/locks?limit=500", "", ""),
            Attack::ListForged => ask("GET", &format!("/locks?limit=500&cursor={}", forged_cursor()), "", ""),
            Attack::Bodies => unfinished(number, path, key),
            Attack::FillMetadata => {
                let metadata = "x".repeat(self.metadata.load(Ordering::Relaxed) as usize);
                post(path, &format!(r#"{{"ttl_ms":300000,"metadata":{{"a":"{metadata}"}}}}"#))
            }
            Attack::FillTtl => post(path, r#"{"ttl_ms":10}"#),
            Attack::FillRelease => ask("DELETE", path, &made_up_token(), ""),
            Attack::WaitPlaces => post(&format!("/locks/attack-{}", number % 11), wait),
            Attack::WaitNames => post(&format!("/locks/attack-{number}"), wait),
            Attack::WaitTiny => post(&line(number), r#"{"ttl_ms":10,"wait_ms":25000}"#),
            // Where there are no keys, nobody is refused for his.
            Attack::Refused if key.is_empty() => post("/locks/not%20a%20name", r#"{"ttl_ms":5000}"#),
            Attack::Refused => request("GET", LOCK, Parts { key: &key.replace("AA", "BB"), ..Parts::default() }),
            Attack::Heads => {
                let mut head = request("GET", LOCK, Parts::default());
                head.truncate(head.len() - 2);
                head.extend_from_slice(b"x: ");
                head.resize(12 << 10, b'x');
                head
            }
            Attack::Acquire if granted.is_empty() => post(path, r#"{"ttl_ms":5000}"#),
            Attack::Acquire => ask("DELETE", path, granted, ""),
            Attack::Held => post(LOCK, r#"{"ttl_ms":60000}"#),
            Attack::Get | Attack::Elsewhere => ask("GET", LOCK, "", ""),
        }
    }
}

fn new_path() -> String {
    format!("/locks/attack-{:016x}", rand::random::<u64>())
}

/// Somewhere in the keys of one of the masters.
fn forged_cursor() -> String {
    let place = rand::random_range(0..1_000_000).to_string();
    let hex: String = place.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-0-{hex}", rand::random_range(0..5))
}

/// In the form of those of this service, of about now.
fn made_up_token() -> String {
    let micros = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
    format!("1.{micros}.{:040x}", rand::random::<u128>())
}

/// A POST or PATCH whose body does not come.
fn unfinished(number: u32, path: &str, key: &str) -> Vec<u8> {
    let token = made_up_token();
    let (method, token) = if number.is_multiple_of(2) { ("POST", "") } else { ("PATCH", token.as_str()) };
    let mut text = request(method, path, Parts { key, token, body: "0123456789" });
    text.truncate(text.len() - 10);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_does_not_come_is_announced() {
        for number in 0..2 {
            let text = String::from_utf8(unfinished(number, LOCK, "key")).unwrap();
            assert!(text.contains("content-length: 10\r\n") && text.ends_with("\r\n\r\n"), "{text}");
        }
    }

    #[test]
    fn the_last_tally_says_what_was_got_since_an_earlier_one() {
        let output = r#"a warning
{"is_ready":false,"holding":2,"got":{"201":3}}
{"is_ready":true,"holding":4,"got":{"201":5,"closed":1,"429":0}}
{"is_re"#;
        let last = Tally::last_of(output).unwrap();
        let before = Tally { got: [("201".to_owned(), 3)].into(), ..Tally::default() };
        assert!(last.is_ready && last.holding == 4);
        assert_eq!(last.since(&before), [("201".to_owned(), 2), ("closed".to_owned(), 1)].into());
    }
}

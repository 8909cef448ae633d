//! Follows locks by a gateway's stream of events.
//!
//! A task reads the stream, so that [`Watching::next`] may be cancelled at any time. If the stream
//! is cut, the task opens it again, at the next gateway if there are several. It sends the id of the
//! last event. If the gateway still has the events after that one, the stream goes on with them.
//! Otherwise it begins with a snapshot.
//!
//! A slow reader holds up the task, and so the gateway. A gateway that cannot wait drops events, and
//! says so by [`WatchEvent::Lagged`].

use std::time::Duration;

use redlock_api::{
    Lagged, LockSnapshot, LockStatus, Problem, ProblemCode, StreamEnd, StreamEndReason,
};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Method, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::client::{
    ALL_TRIES, Answer, Backoff, Client, NoAnswer, ONE_TRY, Route, SHORTEST_TRY, listing,
};
use crate::clock::Moment;
use crate::error::Error;
use crate::events::{Parser, ServerEvent};
use crate::http::{Call, innermost};

/// A stream that is silent for so long counts as cut. A gateway sends a heartbeat each 15 s.
const LONGEST_SILENCE: Duration = Duration::from_secs(45);
/// The pause before a new connection, unless the gateway asks for another one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two tries to connect, but for a gateway's `Retry-After`.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many events wait for [`Watching::next`].
const WAITING_EVENTS: usize = 64;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// What to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watched {
    /// The lock of this name.
    Lock(String),
    /// All locks whose names begin with this text.
    Prefix(String),
}

/// The state of everything that is watched.
#[derive(Debug, Clone, PartialEq)]
pub enum Snapshot {
    /// The watched lock.
    Lock(Box<Answer<LockStatus>>),
    /// The held locks with the prefix.
    Prefix(Answer<LockSnapshot>),
}

/// What happened to a lock, or to the stream.
///
/// After a hold has ended, `state` is `free`, and the other fields are those of the ended hold. A
/// key without the permission `inspect` gets only the name and the state.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum WatchEvent {
    /// A gateway has begun a stream. If the stream does not go on after the last event, a snapshot
    /// follows.
    Connected {
        /// The URL of the gateway.
        gateway: String,
    },
    Snapshot(Snapshot),
    /// Somebody has acquired the lock, or a slot of it.
    Held(Answer<LockStatus>),
    /// The holder has extended the lock.
    Extended(Answer<LockStatus>),
    /// The holder has released the lock.
    Released(Answer<LockStatus>),
    /// The lock's TTL has ended.
    Expired(Answer<LockStatus>),
    /// An operator has released the lock.
    Forced(Answer<LockStatus>),
    /// The line at the gateway has changed. `waiters` and `waiters_total` describe it.
    Waiters(Answer<LockStatus>),
    /// The gateway has dropped events, because they were not read in time. A snapshot follows.
    Lagged {
        missed: u64,
    },
    /// The stream has ended, and is opened again. Repeated when the reason changes. Nothing is known
    /// about the locks until [`WatchEvent::Connected`].
    Disconnected {
        why: String,
    },
}

/// A stream of events. Dropping it closes the connection.
#[derive(Debug)]
pub struct Watching {
    events: mpsc::Receiver<Result<WatchEvent, Error>>,
    task: AbortHandle,
    /// The error that has ended the stream.
    end: Option<Error>,
}

impl Client {
    /// Follows a lock, or all locks with a prefix. Returns when a gateway has begun a stream of
    /// events.
    ///
    /// ```no_run
    /// # async fn example(client: redlock_client::Client) -> Result<(), redlock_client::Error> {
    /// use redlock_client::{WatchEvent, Watched};
    ///
    /// let mut watching = client.watch(Watched::Prefix("jobs/".into())).await?;
    /// loop {
    ///     if let WatchEvent::Expired(lock) = watching.next().await? {
    ///         eprintln!("{} was not released by {:?}", lock.name, lock.owner);
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`], with status 401 or 403 if the key may not watch this;
    /// [`Error::Unavailable`]; [`Error::Setup`] if no lock can have the name.
    pub async fn watch(&self, watched: Watched) -> Result<Watching, Error> {
        let call = match &watched {
            Watched::Lock(name) => Call::of_lock(Method::GET, name)?,
            Watched::Prefix(prefix) => listing([("prefix", &**prefix)])?,
        };
        let until = Moment::now() + self.timeout().unwrap_or(ALL_TRIES);
        let mut route = self.route();
        let mut backoff = Backoff::default();
        let stream = loop {
            let one_try = ONE_TRY.min(until.left());
            let round = match self.open(&call, one_try, &mut route).await {
                Ok(stream) => break stream,
                Err(NoAnswer::Refused(problem)) => {
                    return Err(Error::Refused { name: call.name, problem });
                }
                Err(NoAnswer::Round(round)) => round,
            };
            let pause = backoff.next(round.retry_after);
            if round.is_unreachable || pause + SHORTEST_TRY >= until.left() {
                return Err(round.unavailable(call.name));
            }
            tokio::time::sleep(pause).await;
        };
        let (sender, events) = mpsc::channel(WAITING_EVENTS);
        let client = self.clone();
        let parser = Parser::default();
        let follower =
            Follower { client, watched, call, route, parser, events: sender, failures: 0 };
        let task = tokio::spawn(follower.follow(stream)).abort_handle();
        Ok(Watching { events, task, end: None })
    }
}

impl Watching {
    /// The next event. Waits until there is one. May be cancelled without loss.
    ///
    /// # Errors
    /// [`Error::Refused`] when the key may no longer watch this, with status 401 or 403. The stream
    /// then has ended, and each further call returns the same error.
    pub async fn next(&mut self) -> Result<WatchEvent, Error> {
        if let Some(error) = &self.end {
            return Err(error.clone());
        }
        let next = self.events.recv().await;
        let next = next.unwrap_or_else(|| Err(Error::Setup("the runtime has ended".into())));
        self.end = next.as_ref().err().cloned();
        next
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Snapshot {
    /// The watched lock, or the held locks.
    pub fn locks(&self) -> &[LockStatus] {
        match self {
            Self::Lock(status) => std::slice::from_ref(status),
            Self::Prefix(snapshot) => &snapshot.locks,
        }
    }

    /// Whether [`Snapshot::locks`] are all, and the gateway follows all of them. A gateway shows up to
    /// 10,000.
    pub fn is_complete(&self) -> bool {
        match self {
            Self::Lock(_) => true,
            Self::Prefix(snapshot) => snapshot.is_complete,
        }
    }
}

impl WatchEvent {
    /// The name of the event: on the wire, or of the same form.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Connected { .. } => "connected",
            Self::Snapshot(_) => "snapshot",
            Self::Held(_) => "held",
            Self::Extended(_) => "extended",
            Self::Released(_) => "released",
            Self::Expired(_) => "expired",
            Self::Forced(_) => "forced",
            Self::Waiters(_) => "waiters",
            Self::Lagged { .. } => "lagged",
            Self::Disconnected { .. } => "disconnected",
        }
    }

    /// The data as the gateway sent it. `None` for events about the stream.
    pub fn json(&self) -> Option<&Value> {
        match self {
            Self::Snapshot(Snapshot::Lock(status)) => Some(&status.json),
            Self::Held(status)
            | Self::Extended(status)
            | Self::Released(status)
            | Self::Expired(status)
            | Self::Forced(status)
            | Self::Waiters(status) => Some(&status.json),
            Self::Snapshot(Snapshot::Prefix(snapshot)) => Some(&snapshot.json),
            Self::Connected { .. } | Self::Lagged { .. } | Self::Disconnected { .. } => None,
        }
    }
}

/// What an event of the stream means.
#[derive(Debug, PartialEq)]
enum Meaning {
    Event(Box<WatchEvent>),
    End(StreamEndReason),
    /// An event of a newer gateway.
    Unknown,
}

fn meaning(watched: &Watched, event: &ServerEvent) -> Result<Meaning, serde_json::Error> {
    fn data<T: DeserializeOwned>(event: &ServerEvent) -> Result<T, serde_json::Error> {
        serde_json::from_str(&event.data)
    }
    let event = match &*event.name {
        "snapshot" => WatchEvent::Snapshot(match watched {
            Watched::Lock(_) => Snapshot::Lock(data(event)?),
            Watched::Prefix(_) => Snapshot::Prefix(data(event)?),
        }),
        "held" => WatchEvent::Held(data(event)?),
        "extended" => WatchEvent::Extended(data(event)?),
        "released" => WatchEvent::Released(data(event)?),
        "expired" => WatchEvent::Expired(data(event)?),
        "forced" => WatchEvent::Forced(data(event)?),
        "waiters" => WatchEvent::Waiters(data(event)?),
        "lagged" => WatchEvent::Lagged { missed: data::<Lagged>(event)?.missed },
        "end" => return Ok(Meaning::End(data::<StreamEnd>(event)?.reason)),
        _ => return Ok(Meaning::Unknown),
    };
    Ok(Meaning::Event(Box::new(event)))
}

/// Why a stream is over.
enum Over {
    /// The connection or its gateway has failed.
    Cut(String),
    /// The gateway has ended the stream.
    Ended(StreamEndReason),
    /// Nobody reads the events.
    Unread,
}

/// The task that reads the stream.
struct Follower {
    client: Client,
    watched: Watched,
    call: Call,
    route: Route,
    parser: Parser,
    events: mpsc::Sender<Result<WatchEvent, Error>>,
    /// Failed tries to connect since the last event.
    failures: u32,
}

impl Follower {
    async fn follow(mut self, mut stream: Response) {
        loop {
            let gateway = self.client.url(self.route.at).to_owned();
            let connected = WatchEvent::Connected { gateway: gateway.clone() };
            if self.events.send(Ok(connected)).await.is_err() {
                return;
            }
            let why = match self.read(&mut stream).await {
                Over::Unread => return,
                Over::Ended(StreamEndReason::Revoked) => {
                    return drop(self.events.send(Err(self.revoked())).await);
                }
                Over::Cut(why) => {
                    self.try_another();
                    format!("{gateway}: {why}")
                }
                Over::Ended(StreamEndReason::Draining) => {
                    self.try_another();
                    format!("{gateway} shuts down")
                }
                Over::Ended(StreamEndReason::Time | StreamEndReason::Other) => {
                    format!("{gateway} asks for a new connection")
                }
            };
            drop(stream);
            stream = match self.reconnect(why).await {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => return drop(self.events.send(Err(error)).await),
            };
        }
    }

    /// Passes on the events of one stream until it is over.
    async fn read(&mut self, stream: &mut Response) -> Over {
        self.parser.restart();
        loop {
            let piece = match tokio::time::timeout(LONGEST_SILENCE, stream.chunk()).await {
                Ok(Ok(Some(piece))) => piece,
                Ok(Ok(None)) => return Over::Cut("the stream was closed".into()),
                Ok(Err(error)) => return Over::Cut(innermost(&error).to_string()),
                Err(_) => {
                    let silence = LONGEST_SILENCE.as_secs();
                    return Over::Cut(format!("nothing was received for {silence} s"));
                }
            };
            let mut events = Vec::new();
            if let Err(error) = self.parser.read(&piece, |event| events.push(event)) {
                return Over::Cut(error.to_string());
            }
            for event in events {
                self.failures = 0;
                match meaning(&self.watched, &event) {
                    Ok(Meaning::Event(event)) => {
                        if self.events.send(Ok(*event)).await.is_err() {
                            return Over::Unread;
                        }
                    }
                    Ok(Meaning::End(reason)) => return Over::Ended(reason),
                    Ok(Meaning::Unknown) => {}
                    Err(error) => return Over::Cut(format!("event {:?}: {error}", event.name)),
                }
            }
        }
    }

    /// Opens a new stream, whenever that succeeds. `None` if nobody reads the events.
    async fn reconnect(&mut self, why: String) -> Result<Option<Response>, Error> {
        let mut call = self.call.clone();
        if let Ok(id) = HeaderValue::try_from(self.parser.last_event_id())
            && !id.is_empty()
        {
            call = call.header(&LAST_EVENT_ID, id);
        }
        let (mut why, mut told) = (why, None);
        let mut shortest = Duration::ZERO;
        loop {
            if told.as_ref() != Some(&why) {
                let disconnected = WatchEvent::Disconnected { why: why.clone() };
                if self.events.send(Ok(disconnected)).await.is_err() {
                    return Ok(None);
                }
                told = Some(why);
            }
            tokio::time::sleep(self.pause(shortest)).await;
            match self.client.open(&call, ONE_TRY, &mut self.route).await {
                Ok(stream) => return Ok(Some(stream)),
                Err(NoAnswer::Refused(problem)) => {
                    return Err(Error::Refused { name: self.call.name.clone(), problem });
                }
                Err(NoAnswer::Round(round)) => {
                    shortest = round.retry_after;
                    // The name is known to who watches.
                    why = round.unavailable(None).to_string();
                }
            }
        }
    }

    /// The pause before the next try to connect. Grows with each failure.
    fn pause(&mut self, shortest: Duration) -> Duration {
        let first = self.parser.retry().unwrap_or(FIRST_PAUSE);
        let pause = pause(first, self.failures);
        self.failures = self.failures.saturating_add(1);
        // Many watchers of one gateway lose their streams at the same time.
        pause.mul_f64(0.5 + fastrand::f64()).max(shortest)
    }

    fn try_another(&mut self) {
        self.route.at = (self.route.at + 1) % self.client.gateways() as usize;
    }

    fn revoked(&self) -> Error {
        let problem = Problem {
            status: 403,
            code: ProblemCode::Forbidden.as_str().into(),
            detail: "the gateway has ended the stream: the API key was removed, or it may no \
                     longer watch this"
                .into(),
            ..Problem::default()
        };
        Error::Refused { name: self.call.name.clone(), problem: Box::new(problem) }
    }
}

fn pause(first: Duration, failures: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(failures)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, data: &str) -> ServerEvent {
        ServerEvent { name: name.into(), data: data.into() }
    }

    #[test]
    fn events_have_types_and_keep_their_json() {
        let lock = Watched::Lock("a".into());
        let text = r#"{"name":"a","state":"held","owner":"me","newer":1}"#;
        let Meaning::Event(held) = meaning(&lock, &event("held", text)).unwrap() else {
            panic!("no event");
        };
        let WatchEvent::Held(status) = &*held else { panic!("{held:?}") };
        assert_eq!((&*status.name, status.owner.as_deref()), ("a", Some("me")));
        assert_eq!((held.name(), held.json().unwrap().to_string()), ("held", text.into()));

        let text = r#"{"locks":[{"name":"a/1","state":"held"}],"is_complete":false}"#;
        let prefix = Watched::Prefix("a/".into());
        let Meaning::Event(snapshot) = meaning(&prefix, &event("snapshot", text)).unwrap() else {
            panic!("no event");
        };
        let WatchEvent::Snapshot(snapshot) = *snapshot else { panic!("{snapshot:?}") };
        assert_eq!((snapshot.locks().len(), snapshot.is_complete()), (1, false));
        assert!(meaning(&lock, &event("snapshot", text)).is_err(), "this is no lock");

        let lagged = meaning(&lock, &event("lagged", r#"{"missed":3}"#)).unwrap();
        assert_eq!(lagged, Meaning::Event(Box::new(WatchEvent::Lagged { missed: 3 })));
        let end = |reason| meaning(&lock, &event("end", reason)).unwrap();
        assert_eq!(end(r#"{"reason":"revoked"}"#), Meaning::End(StreamEndReason::Revoked));
        assert_eq!(end(r#"{"reason":"newer"}"#), Meaning::End(StreamEndReason::Other));
        assert_eq!(meaning(&lock, &event("newer", "x")).unwrap(), Meaning::Unknown);
    }

    #[test]
    fn pauses_grow_up_to_the_longest() {
        let pauses = [0, 1, 2, 3, 4, u32::MAX].map(|failures| pause(FIRST_PAUSE, failures));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [1, 2, 4, 8, 10, 10]);
    }
}

//! One connection to one master, from connect to the first error. Never repaired: what failed is dropped, and the lane
//! opens a new session. That is what keeps a command of before a restart from running after it; the client's own
//! reconnect and replay logic gives no such promise, so it stays off (no policy, one attempt).

use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fred::clients::Client;
use fred::error::{Error, ErrorKind};
use fred::interfaces::{ClientLike, EventInterface, KeysInterface, LuaInterface, PubsubInterface};
use fred::types::config::{Config, ServerConfig, TlsConfig};
use fred::types::scan::ScanType;
use fred::types::{Builder, ConnectHandle, CustomCommand, InfoKind, Key, Message, RespVersion, Value};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use super::url::RedisUrl;
use super::{RedisSettings, tls};
use crate::node::admission::{Facts, SETTINGS, marker_key};

const LOCKS_LUA: &str = include_str!("../locks.lua");
const ADMIT_LUA: &str = include_str!("../admit.lua");

/// Messages of a subscription that are kept for who reads them late.
const MESSAGES: usize = 1024;

/// The client does not tell when a subscription is refused.
pub(super) const NOT_HEARD: &str = "what is published there does not come back";

/// A usable connection. Ends when dropped.
pub(super) struct Session {
    client: Client,
    /// Looked at while others use the session.
    connection: Mutex<ConnectHandle>,
    deadline: Duration,
}

/// Why a session failed.
#[derive(Debug)]
pub(super) enum SessionError {
    /// No answer in time: whatever was sent may still run.
    Timeout,
    /// The connection broke: whatever was sent may have run.
    Broken(String),
    /// The node does not know the script: it was restarted or its scripts were flushed. Nothing ran.
    NoScript,
    /// The node refused the command as a whole, before it ran.
    Refused(String),
    /// The node answered with an error; part of the call may have run.
    Error(String),
}

impl std::fmt::Display for SessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Timeout => f.write_str("no answer in time"),
            Self::NoScript => f.write_str("the node was restarted or its scripts were flushed"),
            Self::Broken(text) | Self::Refused(text) | Self::Error(text) => f.write_str(text),
        }
    }
}

impl From<Error> for SessionError {
    fn from(error: Error) -> Self {
        let text = error.details();
        let word = text.split_whitespace().next().unwrap_or_default();
        match (error.kind(), word) {
            (_, "NOSCRIPT") => Self::NoScript,
            (_, "NOAUTH" | "WRONGPASS" | "NOPERM" | "LOADING" | "BUSY" | "MASTERDOWN") => Self::Refused(text.into()),
            (ErrorKind::Timeout, _) => Self::Timeout,
            (ErrorKind::Unknown | ErrorKind::InvalidArgument | ErrorKind::InvalidCommand, _)
                if word.chars().all(|c| c.is_ascii_uppercase()) =>
            {
                Self::Error(text.into())
            }
            (kind, _) => Self::Broken(format!("{}: {text}", kind.to_str())),
        }
    }
}

/// What there is to see of a node.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) facts: Facts,
    pub(super) marker: Option<String>,
}

/// What became of an attempt to put a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Done,
    /// Another marker stands than the one that was looked at.
    OtherMarker,
    /// The node was restarted since it was looked at.
    OtherProcess,
}

impl Session {
    /// Connects, authenticates and selects the database, all within the call deadline, which also bounds every later
    /// command of the session.
    pub(super) async fn connect(url: &RedisUrl, settings: &RedisSettings) -> Result<Self, SessionError> {
        Self::connect_as(url, settings, false).await
    }

    async fn connect_as(url: &RedisUrl, settings: &RedisSettings, listens: bool) -> Result<Self, SessionError> {
        let deadline = settings.call_deadline();
        let config = Config {
            server: ServerConfig::new_centralized(&url.host, url.port),
            username: url.username.clone(),
            password: url.password.clone(),
            database: url.database,
            tls: if url.tls { Some(secured(settings, deadline).await?) } else { None },
            fail_fast: true,
            // In the older protocol a connection that listens can ask nothing, not even whether anybody is there.
            version: if listens { RespVersion::RESP3 } else { RespVersion::RESP2 },
            ..Config::default()
        };
        let client = Builder::from_config(config)
            .with_connection_config(|connection| {
                connection.connection_timeout = deadline;
                connection.internal_command_timeout = deadline;
                connection.max_command_attempts = 1;
                connection.max_command_buffer_len = 64;
                connection.tcp.nodelay = Some(true);
            })
            .with_performance_config(|performance| {
                if listens {
                    performance.broadcast_channel_capacity = MESSAGES;
                }
            })
            .build()?;
        // Held from here on, so that the connection ends with the session however the start goes.
        let session = Self { connection: Mutex::new(client.connect()), client, deadline };
        match timeout(deadline, session.client.wait_for_connect()).await {
            Err(_) => Err(SessionError::Timeout),
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => {
                // The connection task knows more than "cancelled".
                let cause = match timeout(deadline, session.end()).await {
                    Ok(Ok(Err(cause))) => cause,
                    _ => error,
                };
                Err(cause.into())
            }
        }
    }

    /// Resolves when the connection has ended by itself.
    pub(super) async fn ended(&self) -> String {
        match self.end().await {
            Ok(Err(error)) if !error.details().is_empty() => error.to_string(),
            _ => "the connection was closed".into(),
        }
    }

    async fn end(&self) -> <ConnectHandle as Future>::Output {
        std::future::poll_fn(|cx| Pin::new(&mut *self.connection()).poll(cx)).await
    }

    fn connection(&self) -> MutexGuard<'_, ConnectHandle> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session that hears what is published on a channel. `probe` is published there, and has come back when this returns:
    /// the client does not say when the node refuses a subscription. Messages before it are lost.
    pub(super) async fn subscribe(
        url: &RedisUrl,
        settings: &RedisSettings,
        channel: &str,
        probe: &str,
    ) -> Result<(Self, Receiver<Message>), SessionError> {
        let session = Self::connect_as(url, settings, true).await?;
        let mut messages = session.client.message_rx();
        session.bounded(session.client.subscribe(channel)).await?;
        session.bounded(session.client.publish::<Value, _, _>(channel, probe)).await?;
        let comes_back = async {
            loop {
                match messages.recv().await {
                    Ok(message) if message.value.as_bytes() == Some(probe.as_bytes()) => return Ok(()),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return Err(SessionError::Broken("the client has ended".into())),
                }
            }
        };
        match timeout(session.deadline, comes_back).await {
            Ok(came_back) => came_back.map(|()| (session, messages)),
            Err(_) => Err(SessionError::Refused(NOT_HEARD.into())),
        }
    }

    pub(super) async fn ping(&self) -> Result<(), SessionError> {
        self.bounded(self.client.ping(None)).await
    }

    /// One connection ends with the process it leads to, so facts and marker are of one process.
    pub(super) async fn look(&self, prefix: &str) -> Result<Look, SessionError> {
        let info: Result<String, SessionError> = self.bounded(self.client.info(Some(InfoKind::Default))).await;
        let info = match info {
            // Forbidden or renamed: such a node is unfit, which the facts of an empty answer say in words.
            Err(SessionError::Refused(why) | SessionError::Error(why))
                if why.starts_with("NOPERM") || why.contains("unknown command") =>
            {
                String::new()
            }
            answer => answer?,
        };
        let mut question = vec!["GET"];
        question.extend(SETTINGS);
        let config = CustomCommand::new_static("CONFIG", None, false);
        let settings: Result<Vec<String>, SessionError> = self.bounded(self.client.custom(config, question)).await;
        let settings = match settings {
            Ok(words) => Ok(words.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect::<Vec<_>>()),
            // Forbidden or renamed, as managed services do.
            Err(SessionError::Refused(why) | SessionError::Error(why)) => Err(why),
            Err(error) => return Err(error),
        };
        let facts = Facts::new(&info, settings.as_deref().map_err(String::as_str));
        Ok(Look { facts, marker: self.bounded(self.client.get(marker_key(prefix))).await? })
    }

    pub(super) async fn time_micros(&self) -> Result<i64, SessionError> {
        let parts: Vec<i64> =
            self.bounded(self.client.eval("return redis.call('TIME')", Vec::<Key>::new(), Vec::<Value>::new())).await?;
        match parts.as_slice() {
            [seconds, micros] => Ok(seconds * 1_000_000 + micros),
            _ => Err(SessionError::Error("TIME gave an answer it does not have".into())),
        }
    }

    pub(super) async fn set_marker(&self, prefix: &str, marker: &str) -> Result<(), SessionError> {
        self.bounded(self.client.set(marker_key(prefix), marker, None, None, false)).await
    }

    /// Puts one marker in the place of another, if that one stands and the process is the one that was looked at.
    pub(super) async fn put_marker(
        &self,
        prefix: &str,
        run_id: &str,
        from: Option<&str>,
        to: &str,
    ) -> Result<Put, SessionError> {
        let arguments = vec![run_id.to_owned(), from.unwrap_or_default().to_owned(), to.to_owned()];
        match self.bounded(self.client.eval(ADMIT_LUA, vec![marker_key(prefix)], arguments)).await? {
            1 => Ok(Put::Done),
            2 => Ok(Put::OtherMarker),
            3 => Ok(Put::OtherProcess),
            other => Err(SessionError::Error(format!("the admission script answered {other}, which it cannot"))),
        }
    }

    /// Loads the script of lock operations. Its text begins with the run_id, so every Redis process has a digest of its
    /// own: one that was restarted behind our back answers NOSCRIPT before we have even seen the connection break.
    pub(super) async fn load(&self, run_id: &str, script: &str) -> Result<String, SessionError> {
        self.bounded(self.client.script_load(format!("-- {run_id}\n{script}"))).await
    }

    pub(super) async fn call(
        &self,
        script: &str,
        keys: Vec<Key>,
        arguments: Vec<Value>,
    ) -> Result<Vec<Value>, SessionError> {
        match self.bounded(self.client.evalsha(script, keys, Value::Array(arguments))).await? {
            Value::Array(replies) => Ok(replies),
            other => Err(SessionError::Error(format!("expected a list, got {:?}", other.kind()))),
        }
    }

    pub(super) async fn scan(
        &self,
        cursor: &str,
        pattern: String,
        count: u32,
    ) -> Result<(String, Vec<Bytes>), SessionError> {
        self.bounded(self.client.scan_page(cursor.to_owned(), pattern, Some(count), Some(ScanType::String))).await
    }

    /// A future that was polled once and is dropped at the deadline is still written and its reply consumed: a time-out
    /// here means "unknown", never "not run".
    async fn bounded<T>(&self, command: impl Future<Output = Result<T, Error>>) -> Result<T, SessionError> {
        match timeout(self.deadline, command).await {
            Ok(result) => result.map_err(SessionError::from),
            Err(_) => Err(SessionError::Timeout),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Dropping the client alone would leave its task and its connection behind.
        self.connection().abort();
    }
}

async fn secured(settings: &RedisSettings, deadline: Duration) -> Result<TlsConfig, SessionError> {
    match timeout(deadline, tls::connector(&settings.tls)).await {
        Ok(connector) => connector.map(TlsConfig::from).map_err(|error| SessionError::Broken(error.to_string())),
        Err(_) => Err(SessionError::Broken("the files of certificates could not be read in time".into())),
    }
}

/// The script of lock operations; in a `mutation-testing` build with the given rules.
pub(super) fn locks_script(rules: crate::node::Rules) -> String {
    #[cfg(feature = "mutation-testing")]
    {
        let mut text = LOCKS_LUA.to_owned();
        for (name, on) in [
            ("RULE_RETRY_REWRITES", rules.retry_rewrites),
            ("RULE_RELEASE_IS_A_BARRIER", rules.release_is_a_barrier),
            ("RULE_RELEASE_KEEPS_NEWER", rules.release_keeps_newer),
            ("RULE_CLOCK_IS_CHECKED", rules.clock_is_checked),
            ("RULE_FENCE_IS_CHECKED", rules.fence_is_checked),
            ("RULE_MARKER_IS_CHECKED", rules.marker_is_checked),
        ] {
            text = text.replace(&format!("local {name} = true"), &format!("local {name} = {on}"));
        }
        text
    }
    #[cfg(not(feature = "mutation-testing"))]
    {
        let _ = rules;
        LOCKS_LUA.to_owned()
    }
}

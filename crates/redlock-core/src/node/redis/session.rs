//! One connection to one master, from connect to the first error. A failed connection is never
//! repaired: it is dropped, and a new session is opened. So no command that was sent before a
//! restart of the master can run after the restart. The Redis client could reconnect and send
//! commands again by itself, but that would break this promise. So this is switched off (no
//! reconnect policy, one attempt per command).
//!
//! If a future of the client is polled once and then dropped, its command is still written and its
//! reply consumed. So a deadline means "unknown", never "not run".

use parking_lot::Mutex;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use fred::bytes_utils::Str;
use fred::clients::Client;
use fred::interfaces::{ClientLike, EventInterface, KeysInterface, LuaInterface, PubsubInterface};
#[cfg(feature = "tls")]
use fred::types::config::TlsConfig;
use fred::types::config::{Config, ServerConfig};
use fred::types::{
    Builder, ConnectHandle, CustomCommand, InfoKind, Key, Message, RespVersion, Value,
};
use futures_util::future::{BoxFuture, try_join3};
use futures_util::{FutureExt, poll};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::settings::RedisSettings;
use super::stored;
#[cfg(feature = "tls")]
use super::tls;
use super::url::RedisUrl;
use super::{failure, scripts};
use crate::model::clock::OsEntropy;
use crate::node::codec::{self, Header};
use crate::node::eligibility::{
    Facts, SETTINGS, caught_up_key, database_key, incarnation_of, marker_key, nonce, number_key,
};
use crate::node::link::{
    Answer, Answering, Link, LinkError, LinkErrorKind, MarkerSwap, ProbeReply, RecoveryAnswer,
    RecoveryBatch, Scan, Scanned, Session, StoredPage, Subscription, Swapped,
};
use crate::node::{Effect, Engine, Failure, Hint, Reason, Remedy, Task, Vote, hint};

/// The limit of messages of a subscription that wait for a slow reader.
const MESSAGES: usize = 1024;

/// The way to one master.
#[derive(Clone)]
pub(super) struct RedisLink(Arc<Target>);

struct Target {
    url: RedisUrl,
    /// The key under which the master stores the number for this gateway.
    number_key: String,
    settings: RedisSettings,
}

impl RedisLink {
    pub(super) fn new(url: RedisUrl, settings: RedisSettings) -> Self {
        let number_key = number_key(&settings.key_prefix, nonce(&OsEntropy));
        Self(Arc::new(Target { url, number_key, settings }))
    }

    /// Connects, authenticates and selects the database.
    async fn open(self, is_subscriber: bool) -> Result<RedisSession, LinkError> {
        let Target { url, settings, .. } = self.0.as_ref();
        let deadline = settings.call_deadline();
        let is_tls = url.tls;
        let config = Config {
            server: ServerConfig::new_centralized(&url.host, url.port),
            username: url.username.clone(),
            password: url.password.clone(),
            database: url.database,
            #[cfg(feature = "tls")]
            tls: if url.tls { Some(secured(settings, deadline).await?) } else { None },
            fail_fast: true,
            // In RESP2 a subscribed connection cannot send requests such as PUBLISH.
            version: if is_subscriber { RespVersion::RESP3 } else { RespVersion::RESP2 },
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
                if is_subscriber {
                    performance.broadcast_channel_capacity = MESSAGES;
                }
            })
            .build()?;
        // The client reports the outcome of connecting only to listeners that are already there. So
        // the listener starts before the connection does.
        let listener = client.clone();
        let mut outcome = pin!(listener.wait_for_connect());
        let early = poll!(outcome.as_mut());
        debug_assert!(early.is_pending(), "nothing was connected yet");
        let connection = client.connect();
        // The session holds the task's handle from here on. So the connection ends with the session
        // even if the start fails.
        let task = connection.abort_handle();
        let session = RedisSession {
            target: self,
            client,
            task,
            ended: Mutex::default(),
            loaded: Arc::default(),
        };
        if let Err(error) = outcome.await {
            // The connection task has the cause; this error is only "cancelled".
            return Err(match timeout(deadline, connection).await {
                Ok(Ok(Err(cause))) => failure::on_connecting(cause.into(), is_tls),
                _ => error.into(),
            });
        }
        *session.ended.lock() = Some(connection);
        Ok(session)
    }

    /// The client does not report when the node refuses a subscription. So a test message is
    /// published, and must come back. Messages that arrive before it are dropped.
    async fn open_subscription(self, nonce: u64) -> Result<RedisSubscription, LinkError> {
        let Target { url, settings, .. } = self.0.as_ref();
        let deadline = settings.call_deadline();
        let channel = hint::channel(&settings.key_prefix, url.database);
        let forbidden = |error: LinkError| match error.detail.starts_with("NOPERM") {
            true => {
                let detail = format!("channel {channel}: {}", error.detail);
                LinkError { detail, remedy: Some(Remedy::AllowHints), ..error }
            }
            false => error,
        };
        let late = |_| LinkError::broken("no answer in time");
        let session = timeout(deadline, self.clone().open(true)).await.map_err(late)??;
        let mut messages = session.client.message_rx();
        let probe = format!("0 {nonce:016x}");
        let subscribed = async {
            session.client.subscribe::<&str>(&channel).await?;
            session.client.publish::<Value, _, _>(channel.as_str(), probe.as_str()).await
        };
        let subscribed = timeout(deadline, subscribed).await.map_err(late)?;
        subscribed.map_err(|error| forbidden(error.into()))?;
        let wait_for_echo = async {
            loop {
                match messages.recv().await {
                    Ok(message) if message.value.as_bytes() == Some(probe.as_bytes()) => {
                        return Ok(());
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => {
                        return Err(LinkError::broken("the client has ended"));
                    }
                }
            }
        };
        match timeout(deadline, wait_for_echo).await {
            Ok(echoed) => {
                echoed.map(|()| RedisSubscription { ended: session.closed(), session, messages })
            }
            Err(_) => Err(LinkError {
                kind: LinkErrorKind::Refused,
                detail: format!("messages published on the channel {channel} do not arrive"),
                remedy: Some(Remedy::AllowHints),
            }),
        }
    }
}

impl Link for RedisLink {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        self.clone()
            .open(false)
            .map(|opened| opened.map(|session| Box::new(session) as Box<dyn Session>))
            .boxed()
    }

    fn subscribe(&self, nonce: u64) -> Answering<Box<dyn Subscription>> {
        let opened = self.clone().open_subscription(nonce);
        opened
            .map(|opened| {
                opened.map(|subscription| Box::new(subscription) as Box<dyn Subscription>)
            })
            .boxed()
    }
}

/// A usable connection. Dropping it ends it.
struct RedisSession {
    target: RedisLink,
    client: Client,
    task: AbortHandle,
    ended: Mutex<Option<ConnectHandle>>,
    loaded: Arc<OnceLock<Loaded>>,
}

/// The header of this session's calls, and the way to run them. A call by either way names the
/// node's process, and another process refuses the call.
struct Loaded {
    header: Header,
    way: Way,
}

#[derive(Clone)]
enum Way {
    /// The script with this digest. The script's text contains the run_id, so the digest belongs to
    /// one process.
    Script(Str),
    /// The module's command, with the run_id of the process.
    Module(Bytes),
}

const MODULE_CALL: &str = "REDLOCK.CALL";

/// Calls the module.
async fn by_module(client: Client, run_id: Bytes, call: Vec<u8>) -> Result<Value, LinkError> {
    let command = CustomCommand::new_static(MODULE_CALL, None, false);
    Ok(client.custom(command, vec![Value::Bytes(run_id), Value::Bytes(call.into())]).await?)
}

/// The answer to a call that a master refused as a whole because it accepts no writes. The script
/// would answer the same: an error as the vote of each operation, and the write error for a
/// heartbeat.
fn no_writes(operations: usize, error: LinkError) -> Result<Answer, LinkError> {
    let words = ["MISCONF", "NOREPLICAS", "READONLY"];
    if !words.iter().any(|word| error.detail.starts_with(word)) {
        return Err(error);
    }
    let refused = || Vote::Failed(Failure::new(Reason::Error, Effect::None, error.detail.clone()));
    let votes = std::iter::repeat_with(refused).take(operations).collect();
    Ok(Answer {
        votes,
        time_micros: None,
        is_admitted: true,
        is_number_kept: false,
        write_error: Some(error.detail),
    })
}

impl RedisSession {
    fn prefix(&self) -> &str {
        &self.target.0.settings.key_prefix
    }
}

impl Session for RedisSession {
    fn probe(&self) -> Answering<ProbeReply> {
        let client = self.client.clone();
        let key = marker_key(self.prefix());
        let caught_up_key = caught_up_key(self.prefix());
        let number_key = self.target.0.number_key.clone();
        async move {
            let info: Result<String, LinkError> =
                client.info(Some(InfoKind::Default)).await.map_err(LinkError::from);
            let info = match info {
                // INFO is forbidden or renamed. The facts of an empty answer make the node
                // ineligible, with the reason.
                Err(error) if is_forbidden(&error) => String::new(),
                answer => answer?,
            };
            let mut question = vec!["GET"];
            question.extend(SETTINGS);
            let config = CustomCommand::new_static("CONFIG", None, false);
            let settings: Result<Vec<String>, LinkError> =
                client.custom(config, question).await.map_err(LinkError::from);
            let settings = match settings {
                Ok(words) => Ok(words
                    .chunks_exact(2)
                    .map(|pair| (pair[0].clone(), pair[1].clone()))
                    .collect::<Vec<_>>()),
                // CONFIG is forbidden or renamed, as on many managed services.
                Err(LinkError {
                    kind: LinkErrorKind::Refused | LinkErrorKind::Error,
                    detail,
                    ..
                }) => Err(detail),
                Err(error) => return Err(error),
            };
            let mut facts = Facts::new(&info, settings.as_deref().map_err(String::as_str));
            if facts.cluster_slots.is_some() {
                let cluster = CustomCommand::new_static("CLUSTER", None, false);
                let nodes: Result<String, LinkError> =
                    client.custom(cluster, vec!["NODES"]).await.map_err(LinkError::from);
                facts.read_cluster_slots(&nodes?);
                if !facts.serves_all_slots() {
                    // The marker may be among the keys that other masters serve.
                    return Ok(ProbeReply { facts, marker: None, is_caught_up: false, number: 0 });
                }
            }
            let (marker, caught_up, number) = (
                client.get::<Option<String>, _>(key),
                client.get::<Option<String>, _>(caught_up_key),
                client.get::<Option<u64>, _>(number_key),
            );
            let (marker, caught_up, number) = try_join3(marker, caught_up, number).await?;
            let number = number.unwrap_or_default();
            let stands = marker.as_deref().map(incarnation_of);
            let is_caught_up = stands.is_some() && caught_up.as_deref() == stands;
            Ok(ProbeReply { facts, marker, is_caught_up, number })
        }
        .boxed()
    }

    fn swap_marker(
        &self,
        MarkerSwap { run_id, from, to, probed_micros }: MarkerSwap,
    ) -> Answering<Swapped> {
        let client = self.client.clone();
        let key = marker_key(self.prefix());
        let database = self.target.0.url.database.unwrap_or_default().to_string();
        let database_key = database_key(self.prefix(), &to);
        async move {
            let keys = vec![key, database_key.clone()];
            let arguments = vec![run_id, from.unwrap_or_default(), to, database.clone(), probed_micros.to_string()];
            match client.eval(scripts::SWAP_MARKER, keys, arguments).await? {
                Value::Integer(1) => Ok(Swapped::Done),
                Value::Integer(2) => Ok(Swapped::OtherMarker),
                Value::Integer(3) => Ok(Swapped::OtherProcess),
                Value::String(used) => Err(LinkError {
                    kind: LinkErrorKind::Refused,
                    detail: format!("the cluster uses database {used} here (its key {database_key}), not {database}"),
                    remedy: Some(Remedy::UseOneDatabase),
                }),
                other => Err(error(format!("the marker script gave an impossible answer: {other:?}"))),
            }
        }
        .boxed()
    }

    fn scan(&self, scan: Scan) -> Answering<Scanned> {
        stored::scan(self.client.clone(), scan).boxed()
    }

    fn stored(&self, cursor: Option<Bytes>, longest_life: Duration) -> Answering<StoredPage> {
        stored::page(self.client.clone(), self.prefix().to_owned(), longest_life, cursor).boxed()
    }

    fn recover(&self, recovery: RecoveryBatch) -> Answering<RecoveryAnswer> {
        stored::recover(self.client.clone(), &self.target.0.settings, recovery).boxed()
    }

    fn mark_caught_up(&self, marker: &str) -> Answering<()> {
        let client = self.client.clone();
        let keys = vec![marker_key(self.prefix()), caught_up_key(self.prefix())];
        let incarnation = incarnation_of(marker).to_owned();
        async move { Ok(client.eval::<(), _, _, _>(scripts::CAUGHT_UP, keys, vec![incarnation]).await?) }
            .boxed()
    }

    fn time_micros(&self) -> Answering<i64> {
        let client = self.client.clone();
        async move {
            let time =
                client.eval("return redis.call('TIME')", Vec::<Key>::new(), Vec::<Value>::new());
            let parts: Vec<i64> = time.await?;
            match parts.as_slice() {
                [seconds, micros] => Ok(seconds * 1_000_000 + micros),
                _ => Err(error("TIME gave an impossible answer")),
            }
        }
        .boxed()
    }

    fn load(&self, run_id: &str, incarnation: &str) -> Answering<Engine> {
        let Target { url, number_key, settings } = self.target.0.as_ref();
        let channel = hint::channel(&settings.key_prefix, url.database);
        let marker_key = marker_key(&settings.key_prefix);
        let header = Header::new(&marker_key, incarnation, &channel, number_key, &settings.node);
        let script = scripts::locks(run_id, settings.node.rules());
        let client = self.client.clone();
        let loaded = self.loaded.clone();
        let run_id = Bytes::copy_from_slice(run_id.as_bytes());
        let is_native = scripts::all_on(settings.node.rules());
        async move {
            let mut way = None;
            if is_native {
                // This heartbeat tests for the module: it fails without the module, and with a
                // module of another version.
                let heartbeat = codec::pack_call(&header, 0, [].iter());
                match by_module(client.clone(), run_id.clone(), heartbeat).await {
                    Ok(answer) if is_heartbeat_answer(&answer) => way = Some(Way::Module(run_id)),
                    Err(error @ LinkError { kind: LinkErrorKind::Broken, .. }) => {
                        return Err(error);
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            let (way, engine) = match way {
                Some(way) => (way, Engine::Native),
                None => (
                    Way::Script(client.script_load::<String, _>(script).await?.into()),
                    Engine::Lua,
                ),
            };
            // A session is loaded only once.
            drop(loaded.set(Loaded { header, way }));
            Ok(engine)
        }
        .boxed()
    }

    fn call(&self, tasks: &[Task], number: u64) -> Answering<Answer> {
        let client = self.client.clone();
        let Some(Loaded { header, way }) = self.loaded.get() else {
            return async { Err(LinkError::new(LinkErrorKind::NoScript, "no script was loaded")) }
                .boxed();
        };
        let operations = tasks.len();
        let way = way.clone();
        let call = codec::pack_call(header, number, tasks.iter().map(|task| &task.op));
        async move {
            let answer: Value = match way {
                Way::Script(digest) => {
                    client.evalsha(digest, Vec::<Key>::new(), Value::Bytes(call.into())).await?
                }
                Way::Module(run_id) => match by_module(client, run_id, call).await {
                    Ok(answer) => answer,
                    Err(error) => return no_writes(operations, error),
                },
            };
            let answer =
                answer.into_bytes().and_then(|answer| codec::unpack_answer(operations, answer));
            answer.ok_or_else(|| error("the master gave a malformed answer"))
        }
        .boxed()
    }

    fn closed(&self) -> BoxFuture<'static, String> {
        let connection = self.ended.lock().take();
        async move {
            match connection {
                Some(connection) => match connection.await {
                    Ok(Err(error)) if !error.details().is_empty() => LinkError::from(error).detail,
                    _ => "the connection was closed".into(),
                },
                None => std::future::pending().await,
            }
        }
        .boxed()
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        // Dropping only the client would leave its task and its connection behind.
        self.task.abort();
    }
}

/// A connection that receives hints.
struct RedisSubscription {
    ended: BoxFuture<'static, String>,
    session: RedisSession,
    messages: Receiver<Message>,
}

impl Subscription for RedisSubscription {
    fn next(&mut self) -> BoxFuture<'_, Result<Hint, LinkError>> {
        async move {
            loop {
                tokio::select! {
                    biased;
                    why = &mut self.ended => return Err(LinkError::broken(why)),
                    message = self.messages.recv() => match message {
                        Ok(message) => {
                            if let Some(text) = message.value.into_bytes() {
                                return Ok(Hint::received(text));
                            }
                        }
                        // More messages arrived than can wait, so the oldest are lost. Nobody
                        // relies on hints.
                        Err(RecvError::Lagged(_)) => {}
                        Err(RecvError::Closed) => return Err(LinkError::broken("the client has ended")),
                    },
                }
            }
        }
        .boxed()
    }

    fn ping(&self) -> Answering<()> {
        let client = self.session.client.clone();
        async move { Ok(client.ping(None).await?) }.boxed()
    }
}

#[cfg(feature = "tls")]
async fn secured(
    settings: &RedisSettings,
    deadline: std::time::Duration,
) -> Result<TlsConfig, LinkError> {
    match timeout(deadline, tls::connector(&settings.tls)).await {
        Ok(connector) => {
            connector.map(TlsConfig::from).map_err(|error| LinkError::broken(error.to_string()))
        }
        Err(_) => Err(LinkError::broken("the certificate files could not be read in time")),
    }
}

fn is_forbidden(error: &LinkError) -> bool {
    let answered = matches!(error.kind, LinkErrorKind::Refused | LinkErrorKind::Error);
    answered && (error.detail.starts_with("NOPERM") || error.detail.contains("unknown command"))
}

/// Whether this is an answer to a heartbeat.
fn is_heartbeat_answer(answer: &Value) -> bool {
    answer.clone().into_bytes().is_some_and(|answer| codec::unpack_answer(0, answer).is_some())
}

fn error(detail: impl Into<String>) -> LinkError {
    LinkError::new(LinkErrorKind::Error, detail)
}

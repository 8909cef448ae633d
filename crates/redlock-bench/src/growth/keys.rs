//! What is on the masters: how many keys of which kind, and how much memory they take.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::ClientLike;
use fred::types::Builder;
use fred::types::config::{Config, ServerConfig};
use futures_util::future::try_join_all;
use futures_util::stream::TryStreamExt as _;
use serde::Serialize;

/// In front of the name, in a lock's key. A fence's key begins otherwise.
pub(super) const LOCK_PREFIX: &str = "lock:";
/// Keys that one call goes through: a master is not kept busy for longer than a few ms.
const PAGE: u32 = 5000;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A connection to each master.
pub(super) struct Keys(Vec<(SocketAddr, Client)>);

/// What one master has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Master {
    pub(super) keys: u64,
    pub(super) memory_bytes: u64,
    /// Keys that have expired since it was started.
    pub(super) expired: u64,
}

impl Keys {
    pub(super) async fn connect(masters: impl Iterator<Item = SocketAddr>) -> Result<Self, String> {
        let connect = async |master: SocketAddr| {
            let config = Config {
                server: ServerConfig::new_centralized(master.ip().to_string(), master.port()),
                ..Config::default()
            };
            let client = Builder::from_config(config).build()?;
            client.init().await?;
            Ok((master, client))
        };
        try_join_all(masters.map(connect))
            .await
            .map(Self)
            .map_err(|error: Error| format!("cannot use a master: {error}"))
    }

    pub(super) async fn look(&self) -> Result<Vec<Master>, String> {
        let look = async |(address, client): &(SocketAddr, Client)| {
            let info: String = client.info(None).await.map_err(|error| format!("INFO at {address}: {error}"))?;
            parse(&info).ok_or_else(|| format!("INFO at {address} has no used_memory or no expired_keys"))
        };
        try_join_all(self.0.iter().map(look)).await
    }

    /// Locks that are still there when the time is over, on all masters together.
    pub(super) async fn until_no_locks(&self, within: Duration) -> Result<u64, String> {
        let began = Instant::now();
        loop {
            let locks = try_join_all(self.0.iter().map(count_locks)).await?.iter().sum();
            if locks == 0 || began.elapsed() > within {
                return Ok(locks);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

async fn count_locks((address, client): &(SocketAddr, Client)) -> Result<u64, String> {
    let keys = client.scan_buffered(format!("{LOCK_PREFIX}*"), Some(PAGE), None);
    let counted = keys.try_fold(0, async |count, _| Ok(count + 1)).await;
    counted.map_err(|error| format!("SCAN at {address}: {error}"))
}

/// The answer to INFO. Without any keys it has no line for them.
fn parse(info: &str) -> Option<Master> {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    let keys = field("db0:keys=").and_then(|rest| rest.split(',').next()).unwrap_or("0");
    Some(Master {
        keys: keys.parse().ok()?,
        memory_bytes: field("used_memory:")?.trim().parse().ok()?,
        expired: field("expired_keys:")?.trim().parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read_with_keys_and_without() {
        let info = "# Memory\r\nused_memory:1200\r\nused_memory_human:1.2K\r\nexpired_keys:3\r\n";
        assert_eq!(parse(info), Some(Master { keys: 0, memory_bytes: 1200, expired: 3 }));
        let info = format!("{info}# Keyspace\r\ndb0:keys=7,expires=6,avg_ttl=0\r\n");
        assert_eq!(parse(&info), Some(Master { keys: 7, memory_bytes: 1200, expired: 3 }));
        assert_eq!(parse("used_memory:1\r\n"), None);
    }
}

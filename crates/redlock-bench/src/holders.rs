//! Locks that are held while something else is measured, by a few connections.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::sleep;

use crate::http::{Connection, write_acquire, write_release};

/// The most that a gateway grants by default: longer than any part of a run.
pub(crate) const HELD_FOR: Duration = Duration::from_secs(300);
const BODY: &str = r#"{"ttl_ms":300000}"#;
const SETTLE_TRIES: u32 = 10;
const SETTLE_PAUSE: Duration = Duration::from_millis(100);

/// An answer that outlives its connection's next request.
pub(crate) struct Settled {
    pub(crate) status: u16,
    pub(crate) lock_token: Vec<u8>,
    pub(crate) text: String,
    repeated: bool,
}

impl Settled {
    /// A release that is repeated may find its work done, and the next one holding the lock. The first may not.
    pub(crate) fn is_released(&self) -> bool {
        self.status == 204 || self.repeated && matches!(self.status, 404 | 409)
    }
}

/// Asks again after a 503: on a machine this busy a master may miss its time-out, and one lock that stays for its TTL
/// would stall all who wait for it.
pub(crate) async fn settle(connection: &mut Connection, request: &[u8]) -> Result<Settled, String> {
    let mut tries = 0;
    loop {
        tries += 1;
        let answer = connection.exchange(request).await?;
        if answer.status != 503 || tries == SETTLE_TRIES {
            let lock_token = answer.lock_token.unwrap_or_default().to_vec();
            return Ok(Settled { status: answer.status, lock_token, text: answer.describe(), repeated: tries > 1 });
        }
        sleep(SETTLE_PAUSE).await;
    }
}

/// One holder per lock, on a few connections.
pub(crate) struct Holders {
    connections: Vec<HolderConnection>,
}

struct HolderConnection {
    connection: Connection,
    held: Share,
}

/// Locks and their tokens.
pub(crate) type Share = Vec<(u64, Vec<u8>)>;

impl Holders {
    /// On so many connections at most.
    pub(crate) async fn take(address: SocketAddr, connections: u32, locks: Vec<u64>) -> Result<Self, String> {
        let shares = locks.chunks(locks.len().div_ceil(connections as usize).max(1));
        let connections = shares.map(async |share| {
            let mut connection = Connection::open(address).await?;
            let (mut held, mut request) = (Vec::with_capacity(share.len()), Vec::with_capacity(192));
            for &lock in share {
                write_acquire(&mut request, lock, BODY);
                let answer = settle(&mut connection, &request).await?;
                if answer.status != 201 {
                    return Err(format!("a holder was answered with {}", answer.text));
                }
                held.push((lock, answer.lock_token));
            }
            Ok(HolderConnection { connection, held })
        });
        Ok(Self { connections: try_join_all(connections).await? })
    }

    /// What is held, as it was shared out among the connections.
    pub(crate) fn shares(&self) -> Vec<Share> {
        self.connections.iter().map(|connection| connection.held.clone()).collect()
    }

    pub(crate) async fn release(self) -> Result<(), String> {
        let releases = self.connections.into_iter().map(async |HolderConnection { mut connection, held }| {
            let mut request = Vec::with_capacity(192);
            for (lock, token) in held {
                write_release(&mut request, lock, &token);
                let answer = settle(&mut connection, &request).await?;
                if !answer.is_released() {
                    return Err(format!("a holder's release was answered with {}", answer.text));
                }
            }
            Ok(())
        });
        try_join_all(releases).await.map(drop)
    }
}

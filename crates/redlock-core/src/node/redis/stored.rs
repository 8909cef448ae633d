//! Reads the locks that a master stores, and writes recovered locks to a master that lost them.

use std::time::Duration;

use bytes::Bytes;
use fred::clients::Client;
use fred::interfaces::{KeysInterface, LuaInterface};
use fred::types::scan::ScanType;
use fred::types::{Key, Value};

use super::scripts;
use super::settings::RedisSettings;
use crate::model::types::LockName;
use crate::node::calls::MAX_BATCH;
use crate::node::codec::LONGEST_VALUE;
use crate::node::eligibility::{incarnation_of, marker_key};
use crate::node::link::{
    LinkError, LinkErrorKind, RecoveryAnswer, RecoveryBatch, Scan, Scanned, Stored, StoredPage,
};
use crate::node::{Keys, Record};

/// The keys read for one page.
const PAGE: u32 = 500;

/// Asserts that every reply to our requests is within the parser's limits. A reply beyond them ends
/// the connection.
const _: () = {
    use redis_protocol::{MAX_BYTES, MAX_ELEMENTS, MAX_PUSH_BYTES};
    const PER_RECORD: usize = LONGEST_VALUE + 64;
    // A call in which every operation finds a record.
    assert!(2 * MAX_BATCH * PER_RECORD <= MAX_BYTES);
    // A page of records, each with its time. SCAN returns some more keys than requested.
    assert!(PAGE as usize * 3 / 2 * PER_RECORD <= MAX_BYTES);
    assert!(4 * 2 * PAGE as usize <= MAX_ELEMENTS);
    // A hint names one lock.
    assert!(8 * LockName::MAX_LEN <= MAX_PUSH_BYTES);
};

pub(super) async fn scan(
    client: Client,
    Scan { key_prefix, cursor, count }: Scan,
) -> Result<Scanned, LinkError> {
    let cursor = match std::str::from_utf8(&cursor) {
        Ok("") => "0",
        Ok(cursor) if cursor.bytes().all(|byte| byte.is_ascii_digit()) => cursor,
        _ => return Err(LinkError::new(LinkErrorKind::Refused, "not a cursor of this node")),
    };
    let page = client.scan_page(
        cursor.to_owned(),
        pattern(&key_prefix),
        Some(count),
        Some(ScanType::String),
    );
    let (next, keys): (String, Vec<Bytes>) = page.await?;
    Ok(Scanned { keys, count, next: (next != "0").then(|| next.into()) })
}

pub(super) async fn page(
    client: Client,
    prefix: String,
    longest_life: Duration,
    cursor: Option<Bytes>,
) -> Result<StoredPage, LinkError> {
    let of_all =
        Scan { key_prefix: prefix.clone().into(), cursor: cursor.unwrap_or_default(), count: PAGE };
    let Scanned { keys, next, .. } = scan(client.clone(), of_all).await?;
    let name = |key: &Bytes| {
        std::str::from_utf8(key).ok()?.strip_prefix(&prefix).and_then(LockName::stored)
    };
    let locks: Vec<_> = keys.into_iter().filter_map(|key| Some((name(&key)?, key))).collect();
    if locks.is_empty() {
        return Ok(StoredPage { stored: Vec::new(), next });
    }
    let (names, keys): (Vec<_>, Vec<_>) = locks.into_iter().unzip();
    let limits = [LONGEST_VALUE.to_string(), longest_life.as_millis().to_string()];
    let arguments: Vec<Bytes> = limits.map(Bytes::from).into_iter().chain(keys).collect();
    let values: Vec<Value> = client.eval(scripts::STORED, Vec::<Key>::new(), arguments).await?;
    let stored = |(name, pair): (LockName, &[Value])| {
        let millis = pair[1].as_u64().filter(|millis| *millis > 0)?;
        let record = Record::foreign(pair[0].clone().into_bytes()?);
        Some(Stored { name, record, expires_in: Duration::from_millis(millis) })
    };
    Ok(StoredPage {
        stored: names.into_iter().zip(values.chunks_exact(2)).filter_map(stored).collect(),
        next,
    })
}

pub(super) fn recover(
    client: Client,
    settings: &RedisSettings,
    RecoveryBatch { marker, puts }: RecoveryBatch,
) -> impl Future<Output = Result<RecoveryAnswer, LinkError>> + use<> {
    let grace = settings.node.fence_grace.as_millis().to_string();
    let marker_key = vec![Bytes::from(marker_key(&settings.key_prefix))];
    let mut arguments =
        vec![Bytes::copy_from_slice(incarnation_of(&marker).as_bytes()), grace.into()];
    for (name, put) in puts {
        let Keys { lock, fence, .. } = Keys::new(&settings.key_prefix, &name);
        let millis = put.expires_in.as_millis().max(1).to_string();
        arguments.extend([
            lock,
            fence,
            put.record.as_bytes().clone(),
            millis.into(),
            put.fence.unwrap_or_default(),
        ]);
    }
    async move {
        Ok(match client.eval::<i64, _, _, _>(scripts::RECOVER, marker_key, arguments).await? {
            1 => RecoveryAnswer::Done,
            2 => RecoveryAnswer::OtherClient,
            _ => RecoveryAnswer::OtherMarker,
        })
    }
}

/// The MATCH pattern for keys with this prefix.
fn pattern(prefix: &[u8]) -> String {
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for c in String::from_utf8_lossy(prefix).chars() {
        if "*?[]^\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('*');
    pattern
}

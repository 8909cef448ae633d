//! Listings under way, and the cursors that they return.
//!
//! A listing costs the masters more work than an acquire, so only few listings may run at a time. A
//! cursor names a master and the position at which to read on. The gateway signs each cursor, so
//! that only the principal that got it can use it.

use std::fmt::Write;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use redlock_core::{ListCursor, LockName, LockState};
use sha2::Sha256;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::overload::clients::{Client, Permit};
use crate::overload::shares::{Full, LISTINGS, LISTINGS_OF_ONE, Resource};

/// Time limit for one page of a listing. When it is reached, the page has the locks that were found
/// until then.
pub(super) const LISTING: Duration = Duration::from_secs(3);
/// How long a listing waits for its turn.
const TURN: Duration = Duration::from_secs(5);
/// Length of a cursor's signature, in bytes.
const SIGNATURE: usize = 16;

/// A request for a page of held locks.
pub struct ListRequest<'a> {
    /// The client that the listing is charged to.
    pub client: &'a Client,
    pub principal: Option<&'a str>,
    pub prefix: &'a str,
    pub limit: usize,
    /// `next` of an earlier page.
    pub cursor: Option<&'a str>,
}

/// A page of held locks, as a client gets it.
#[derive(Debug)]
pub struct ListView {
    pub locks: Vec<(LockName, LockState)>,
    /// The cursor of the next page. `None` at the end.
    pub next: Option<String>,
}

/// The listings of a gateway.
pub(super) struct Listings(Semaphore);

impl Default for Listings {
    fn default() -> Self {
        Self(Semaphore::new(LISTINGS))
    }
}

impl Listings {
    /// Takes a permit of the client's, then waits for its turn among all clients. Listings get turns in
    /// the order in which they began to wait, so no client is kept out by two others that list again
    /// and again.
    pub(super) async fn begin(
        &self,
        client: &Client,
    ) -> Result<(Permit, SemaphorePermit<'_>), Full> {
        let own = client.listing.take(LISTINGS_OF_ONE);
        let own = own.ok_or(Full::for_one(Resource::Listings, LISTINGS_OF_ONE))?;
        let turn = tokio::time::timeout(TURN, self.0.acquire()).await;
        // Nobody closes the semaphore.
        let turn =
            turn.ok().and_then(Result::ok).ok_or(Full::for_all(Resource::Listings, LISTINGS))?;
        Ok((own, turn))
    }

    /// The listings that run.
    pub(super) fn count(&self) -> usize {
        LISTINGS - self.0.available_permits()
    }
}

/// The key that signs cursors.
///
/// Every gateway of a cluster must accept the cursors of the others, so the key is derived from
/// data that they share: the name or list of the node set, and the masters' users and passwords, in
/// order. The key is as secret as those passwords. **If the masters have no password**, anybody who
/// guesses their addresses or the cluster's name can forge cursors. A forged cursor can only choose
/// which master and which position the forger's own listing reads. Compared with
/// a cursor of the gateway, it shows no more locks and costs no more.
#[derive(Clone)]
pub struct CursorKey([u8; 32]);

impl CursorKey {
    /// Derives the key from the data that the gateways of a cluster share.
    pub fn derive<'a>(
        cluster: &str,
        credentials: impl IntoIterator<Item = (Option<&'a str>, Option<&'a str>)>,
    ) -> Self {
        let mut mac = Hmac::<Sha256>::new_from_slice(b"redlock-gateway: cursors")
            .expect("a key of any length");
        part(&mut mac, Some(cluster));
        for (user, password) in credentials {
            part(&mut mac, user);
            part(&mut mac, password);
        }
        Self(mac.finalize().into_bytes().into())
    }

    /// A random key, for cursors of this process alone.
    pub fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// The text of a cursor for a client that lists this prefix.
    pub(super) fn seal(
        &self,
        cursor: &ListCursor,
        prefix: &str,
        principal: Option<&str>,
    ) -> String {
        let mut text = cursor.to_string();
        let signature = self.signature(&text, prefix, principal).finalize().into_bytes();
        write!(text, ".{}", hex::encode(&signature[..SIGNATURE]))
            .expect("a string takes everything");
        text
    }

    /// Returns the cursor in `text` if a gateway gave it to this principal in a listing of this
    /// prefix.
    pub(super) fn open(
        &self,
        text: &str,
        prefix: &str,
        principal: Option<&str>,
    ) -> Option<ListCursor> {
        let (cursor, signature) = text.split_once('.')?;
        let mut shown = [0; SIGNATURE];
        hex::decode_to_slice(signature, &mut shown).ok()?;
        self.signature(cursor, prefix, principal).verify_truncated_left(&shown).ok()?;
        cursor.parse().ok()
    }

    fn signature(&self, cursor: &str, prefix: &str, principal: Option<&str>) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of any length");
        part(&mut mac, Some(cursor));
        part(&mut mac, Some(prefix));
        part(&mut mac, principal);
        mac
    }
}

/// Adds a text, preceded by its length, to the signed bytes. Without the lengths, the lists `ab, c`
/// and `a, bc` would give the same bytes.
fn part(mac: &mut Hmac<Sha256>, text: Option<&str>) {
    let length = text.map_or(u64::MAX, |text| text.len() as u64);
    mac.update(&length.to_be_bytes());
    mac.update(text.unwrap_or_default().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(password: &str) -> CursorKey {
        CursorKey::derive("a:1,b:1", [(None, Some(password)), (Some("user"), None)])
    }

    #[test]
    fn a_cursor_opens_only_in_its_cluster_prefix_and_principal() {
        let cursor: ListCursor = "1-1-3137".parse().unwrap();
        let text = key("secret").seal(&cursor, "a/", Some("me"));
        assert_eq!(key("secret").open(&text, "a/", Some("me")), Some(cursor.clone()));
        for (key, prefix, principal) in [
            (key("other"), "a/", Some("me")),
            (CursorKey::derive("a:1", []), "a/", Some("me")),
            (CursorKey::new([0; 32]), "a/", Some("me")),
            (key("secret"), "a", Some("me")),
            (key("secret"), "a/", Some("you")),
            (key("secret"), "a/", None),
        ] {
            assert_eq!(key.open(&text, prefix, principal), None, "{prefix} {principal:?}");
        }
        let anonymous = key("secret").seal(&cursor, "", None);
        assert_eq!(key("secret").open(&anonymous, "", Some("")), None);
    }

    #[test]
    fn a_changed_or_shortened_cursor_is_refused() {
        let text = key("secret").seal(&"1-1-3137".parse().unwrap(), "", None);
        let open = |text: &str| key("secret").open(text, "", None);
        assert!(open(&text).is_some());
        for at in 0..text.len() {
            let mut other = text.clone().into_bytes();
            other[at] ^= 1;
            assert_eq!(open(&String::from_utf8(other).unwrap()), None, "byte {at} of {text}");
            assert_eq!(open(&text[..at]), None, "{at} bytes of {text}");
        }
        for bad in [
            format!("{text}00"),
            format!("{text}."),
            "1-1-3137".into(),
            "1-1-3137.".into(),
            "0-0-".into(),
        ] {
            assert_eq!(open(&bad), None, "{bad}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn listings_of_other_clients_get_turns() {
        let listings = Listings::default();
        let [a, b, c] = [(); 3].map(|()| Client::default());
        let first = listings.begin(&a).await.expect("a turn");
        let again = listings.begin(&a).await.map(drop);
        assert_eq!(again, Err(Full::for_one(Resource::Listings, 1)));
        let second = listings.begin(&b).await.expect("a turn");
        let late = listings.begin(&c).await.map(drop);
        assert_eq!(late, Err(Full::for_all(Resource::Listings, 2)));
        // A refused listing takes no permit.
        assert_eq!((listings.count(), c.listing.count()), (2, 0));
        // Two clients that list again and again do not keep a third one out.
        let mut third = Box::pin(listings.begin(&c));
        assert!(futures_util::poll!(&mut third).is_pending());
        drop(first);
        let mut again = Box::pin(listings.begin(&a));
        assert!(futures_util::poll!(&mut again).is_pending(), "the third is first");
        let third = third.await.expect("its turn");
        drop((second, third));
        assert!(again.await.is_ok());
    }
}

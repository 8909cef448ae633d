//! Listings under way, and the cursors that they hand out.
//!
//! A listing costs the masters more than a lock does, so few go on at a time, and a cursor is taken only from whom it was
//! given to: it names the master to read, and where.

use std::fmt::Write;

use hmac::{Hmac, KeyInit, Mac};
use redlock_core::{ListCursor, LockName, LockState};
use sha2::Sha256;

use crate::overload::clients::{Client, Counter, Permit};

/// Listings at a time, of all clients and of one.
const MAX: usize = 2;
const MAX_OF_ONE: usize = 1;
/// Of a cursor's signature, in bytes.
const SIGNATURE: usize = 16;

/// A page of held locks that is asked for.
pub struct ListRequest<'a> {
    /// For whom it is counted.
    pub client: &'a Client,
    pub principal: Option<&'a str>,
    pub prefix: &'a str,
    pub limit: usize,
    /// As an earlier page had it.
    pub cursor: Option<&'a str>,
}

/// A page of held locks as a client gets it.
#[derive(Debug)]
pub struct ListView {
    pub locks: Vec<(LockName, LockState)>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<String>,
}

/// Why no listing was begun: so many are under way, as many as are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyListings {
    pub max: usize,
    /// Of the client that asks, or of all.
    pub of_this_client: bool,
}

/// The listings of a gateway.
#[derive(Default)]
pub(super) struct Listings(Counter);

impl Listings {
    /// Takes a place for a listing, of this gateway's and of its client's.
    pub(super) fn begin(&self, client: &Client) -> Result<(Permit, Permit), TooManyListings> {
        let refused = |max, of_this_client| TooManyListings { max, of_this_client };
        let own = client.listing.take(MAX_OF_ONE).ok_or(refused(MAX_OF_ONE, true))?;
        let place = self.0.take(MAX).ok_or(refused(MAX, false))?;
        Ok((own, place))
    }

    pub(super) fn count(&self) -> usize {
        self.0.count()
    }
}

/// What cursors are signed with.
///
/// All gateways of a cluster have to take each other's cursors, so it comes from what they share: the name or the list of the
/// node set, and users and passwords of the masters, in their order. It is as secret as those passwords. **Where the masters
/// have no password**, whoever knows or guesses their addresses, or the name of the cluster, can forge cursors: then he picks
/// the master that his listing reads, and the place. What it may show and what it may cost is the same for every cursor.
#[derive(Clone)]
pub struct CursorKey([u8; 32]);

impl CursorKey {
    /// From what the gateways of a cluster share.
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

    /// Of one process.
    pub fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// As a client gets it that lists this prefix.
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

    /// A cursor that was given to this principal in a listing of this prefix.
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

/// So that no two lists of texts are read as the same bytes.
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
    fn a_cursor_is_taken_by_every_gateway_of_its_cluster_from_whom_it_was_given_to_and_from_nobody_else()
     {
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
    fn a_cursor_that_was_changed_or_cut_is_none() {
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

    #[test]
    fn a_client_lists_once_at_a_time_and_all_clients_twice() {
        let listings = Listings::default();
        let [a, b, c] = [(); 3].map(|()| Client::default());
        let first = listings.begin(&a).unwrap();
        assert_eq!(
            listings.begin(&a).unwrap_err(),
            TooManyListings { max: 1, of_this_client: true }
        );
        let _second = listings.begin(&b).unwrap();
        assert_eq!(
            listings.begin(&c).unwrap_err(),
            TooManyListings { max: 2, of_this_client: false }
        );
        // One that was refused has taken nothing.
        assert_eq!((listings.count(), c.listing.count()), (2, 0));
        drop(first);
        assert!(listings.begin(&c).is_ok());
    }
}

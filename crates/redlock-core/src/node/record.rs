//! The stored value of a lock, as text that Lua and people can read.

use bytes::Bytes;

use crate::model::types::{FencingToken, Info, LockToken, Nonce, Owner};

/// The stored value of a held lock: `T:grant:info`. T and grant have fixed width; the grant is
/// owner and nonce. The first extension replaces the `:` after the grant by `;`, see
/// `node/locks.lua`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record(Bytes);

impl Record {
    const OWNER_AT: usize = FencingToken::TEXT_LEN + 1;
    /// The length of `T:grant`, in bytes. This part identifies one grant; extensions and releases
    /// compare it.
    pub(crate) const GRANT_LEN: usize = Self::OWNER_AT + LockToken::GRANT_LEN;

    /// The record of a grant.
    pub fn new(token: &LockToken, info: &Info) -> Self {
        let mut text = Vec::with_capacity(Self::GRANT_LEN + 1 + info.0.len());
        text.extend_from_slice(&token.fencing().text());
        text.push(b':');
        token.write_grant(&mut text);
        text.push(b':');
        text.extend_from_slice(&info.0);
        Self(Bytes::from(text))
    }

    /// A value as a node stores it. Other Redlock clients put values of their own under lock keys.
    pub fn foreign(value: Bytes) -> Self {
        Self(value)
    }

    /// The stored value.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// `T:grant`; only for a record of this program.
    pub fn grant(&self) -> &[u8] {
        &self.0[..Self::GRANT_LEN]
    }

    /// The parts, or `None` when another client's value is stored.
    pub fn parse(&self) -> Option<(LockToken, &[u8])> {
        let fencing = self.0.get(..FencingToken::TEXT_LEN)?;
        let token = LockToken::of_texts(fencing, self.0.get(Self::OWNER_AT..Self::GRANT_LEN)?)?;
        let separators = (self.0.get(FencingToken::TEXT_LEN)?, self.0.get(Self::GRANT_LEN)?);
        let info = self.0.get(Self::GRANT_LEN + 1..)?;
        matches!(separators, (b':', b':' | b';')).then_some((token, info))
    }

    /// Whether both records have the same T and grant; one may be extended and the other not. Two
    /// values of other clients count as the same only if they are equal.
    pub(crate) fn is_grant_of(&self, other: &Self) -> bool {
        match (self.parse(), other.parse()) {
            (None, None) => self == other,
            (Some((this, _)), Some((other, _))) => this == other,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }

    /// T; `None` for a value of another client.
    pub(crate) fn fencing_of_ours(&self) -> Option<FencingToken> {
        self.parse().map(|(token, _)| token.fencing())
    }

    /// A record that keeps a lock free from everybody, see [`Owner::NOBODY`].
    pub(crate) fn placeholder(t: FencingToken) -> Self {
        let token = LockToken::new(Owner::NOBODY, Nonce::ZERO, t);
        Self::new(&token, &Info::default())
    }

    /// The placeholder that a release with a time to hold leaves. Behind it is the released grant, so
    /// that its owner, or an operator, can end the hold.
    pub(crate) fn hold(released: &Self, t: FencingToken) -> Self {
        let grant = &released.grant()[Self::OWNER_AT..];
        Self(Bytes::from([&Self::placeholder(t).0[..], grant].concat()))
    }

    /// The grant whose release has left this record. `None` for any other record, and for a
    /// placeholder of recovery, which may stand for a grant that somebody holds.
    pub(crate) fn released_grant(&self) -> Option<LockToken> {
        let (token, grant) = self.parse().filter(|_| self.is_placeholder())?;
        LockToken::of_texts(&token.fencing().text(), grant)
    }

    /// Whether the record keeps a lock free from everybody, see [`Owner::NOBODY`].
    pub(crate) fn is_placeholder(&self) -> bool {
        self.parse().is_some() && self.owner_text() == [b'0'; Owner::TEXT_LEN]
    }

    /// Whether the node that stores the record has extended it.
    pub(crate) fn is_extended(&self) -> bool {
        self.0.get(Self::GRANT_LEN) == Some(&b';')
    }

    pub(crate) fn extended(&self) -> Self {
        let mut text = self.0.to_vec();
        if let Some(separator) = text.get_mut(Self::GRANT_LEN) {
            *separator = b';';
        }
        Self(Bytes::from(text))
    }

    pub(crate) fn owner_text(&self) -> &[u8] {
        self.0.get(Self::OWNER_AT..Self::OWNER_AT + Owner::TEXT_LEN).unwrap_or_default()
    }

    pub(crate) fn fencing(&self) -> Option<FencingToken> {
        FencingToken::parse(self.0.get(..FencingToken::TEXT_LEN)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_parse_back_and_foreign_values_do_not() {
        let token = LockToken::new(
            Owner::from_bytes([7; 16]),
            Nonce::from_bytes([8; 4]),
            FencingToken::MIN,
        );
        let record = Record::new(&token, &Info::new("x:y").unwrap());
        assert_eq!(record.parse(), Some((token, &b"x:y"[..])));
        assert_eq!(record.grant().len(), Record::GRANT_LEN);
        let hold = Record::hold(&record, FencingToken::MIN);
        assert!(hold.is_placeholder() && !record.is_placeholder());
        assert_eq!((hold.released_grant(), record.released_grant()), (Some(token), None));
        assert_eq!(Record::placeholder(FencingToken::MIN).released_grant(), None);
        for foreign in ["", "1", "some-uuid-of-another-client", &"1".repeat(80)] {
            assert_eq!(Record::foreign(Bytes::copy_from_slice(foreign.as_bytes())).parse(), None);
        }
    }
}

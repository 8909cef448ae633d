//! What gateways tell each other through the nodes.
//!
//! Two words are enough. *Waiting*: somebody waits for this lock at the sender, published by the script that refuses the
//! waiter's try, and again with every poll; a gateway where polls are slow says for how long it counts. *Released*: published by the script that releases the lock, if the releasing
//! gateway has heard that somebody waits elsewhere. A node passes hints on and knows nothing of what they say.

use bytes::Bytes;

use crate::model::types::FencingToken;

/// The channel of all gateways that share a prefix and a database. Channels know no databases.
#[cfg(feature = "redis")]
pub(crate) fn channel(prefix: &str, database: Option<u8>) -> String {
    match database {
        None | Some(0) => format!("{{{prefix}}}:hints"),
        Some(number) => format!("{{{prefix}}}:hints:{number}"),
    }
}

/// A message between gateways: `1 <word> <origin> [<T> or seconds] <lock key>`, the numbers of fixed width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint(Bytes);

/// What a hint says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintKind {
    /// Somebody waits here; for how many seconds that counts, where it is not the usual time.
    Waiting { seconds: Option<u64> },
    /// The grant with this token was released here; `waiting` when somebody waits here as well.
    Released { t: FencingToken, waiting: bool },
}

impl Hint {
    pub(crate) fn new(origin: u64, word: HintKind, lock: &Bytes) -> Self {
        use std::io::Write;
        let mut text = Vec::with_capacity(2 + 2 + 17 + 17 + lock.len());
        match word {
            HintKind::Waiting { seconds: None } => write!(text, "1 w {origin:016x} "),
            HintKind::Waiting { seconds: Some(seconds) } => {
                write!(text, "1 l {origin:016x} {seconds:016x} ")
            }
            HintKind::Released { t, waiting: false } => write!(text, "1 r {origin:016x} {t} "),
            HintKind::Released { t, waiting: true } => write!(text, "1 y {origin:016x} {t} "),
        }
        .expect("a Vec takes every write");
        text.extend_from_slice(lock);
        Self(Bytes::from(text))
    }

    /// A message as it came.
    pub fn received(text: Bytes) -> Self {
        Self(text)
    }

    /// The message as it is published.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// `None` for what is no hint, or one of a later version.
    pub(crate) fn parse(&self) -> Option<(u64, HintKind, Bytes)> {
        const NUMBER: usize = 16;
        let field = |from: usize| std::str::from_utf8(self.0.get(from..from + NUMBER)?).ok();
        let number = |from| u64::from_str_radix(field(from)?, 16).ok();
        let origin = number(4)?;
        let (word, lock_at) = match self.0.get(..4)? {
            b"1 w " => (HintKind::Waiting { seconds: None }, 4 + NUMBER + 1),
            b"1 l " => {
                (HintKind::Waiting { seconds: Some(number(4 + NUMBER + 1)?) }, 4 + 2 * (NUMBER + 1))
            }
            kind @ (b"1 r " | b"1 y ") => {
                let t = FencingToken::parse(field(4 + NUMBER + 1)?.as_bytes())?;
                (HintKind::Released { t, waiting: kind == b"1 y " }, 4 + 2 * (NUMBER + 1))
            }
            _ => return None,
        };
        let lock = self.0.get(lock_at..).filter(|lock| !lock.is_empty())?;
        (self.0.get(lock_at - 1)? == &b' ').then(|| (origin, word, Bytes::copy_from_slice(lock)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lock() -> Bytes {
        Bytes::from_static(b"lock:a b")
    }

    #[test]
    fn a_hint_gives_back_what_went_in() {
        let t = FencingToken::MIN;
        let released = [false, true].map(|waiting| HintKind::Released { t, waiting });
        for word in [None, Some(40)]
            .map(|seconds| HintKind::Waiting { seconds })
            .into_iter()
            .chain(released)
        {
            assert_eq!(Hint::new(7, word, &lock()).parse(), Some((7, word, lock())));
        }
    }

    proptest! {
        #[test]
        fn no_message_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Hint::received(Bytes::from(bytes)).parse();
        }

        #[test]
        fn no_beginning_of_a_message_makes_the_parser_panic(kind in "1 [lwry] ", rest in "[0-9a-f ]{0,60}") {
            let _ = Hint::received(Bytes::from(kind + &rest)).parse();
        }
    }
}

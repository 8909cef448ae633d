//! Hints: messages that gateways send each other through the nodes. A node forwards hints and does
//! not read them.
//!
//! A gateway publishes two kinds:
//!
//! - *Waiting*: somebody waits for this lock at the gateway that sends the hint. The master
//!   publishes the hint when it refuses the waiter's acquire, at first and at every poll. If the
//!   gateway polls slowly, the hint also says for how many seconds it is valid.
//! - *Released*: this lock was released. The master publishes the hint when it runs the release.
//!   The releasing gateway adds the hint only if it has received a *waiting* hint from another
//!   gateway.

use bytes::Bytes;

use crate::model::types::FencingToken;

/// The channel of all gateways that share a prefix and a database. The name includes the database
/// because Redis channels span all databases.
#[cfg(feature = "redis")]
pub(crate) fn channel(prefix: &str, database: Option<u8>) -> String {
    match database {
        None | Some(0) => format!("{{{prefix}}}:hints"),
        Some(number) => format!("{{{prefix}}}:hints:{number}"),
    }
}

/// A message between gateways: `1 <kind> <origin> [<T> or seconds] <lock key>`. The origin is a
/// random number that identifies the gateway that publishes the hint. Numbers have a fixed width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint(Bytes);

/// The content of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintKind {
    /// A waiter is at the origin. `seconds` is how long the hint is valid; `None` for the usual
    /// time.
    Waiting { seconds: Option<u64> },
    /// The grant with this token was released at the origin. `waiting` is whether somebody waits
    /// for the lock there, too.
    Released { t: FencingToken, waiting: bool },
}

impl Hint {
    pub(crate) fn new(origin: u64, kind: HintKind, lock: &Bytes) -> Self {
        use std::io::Write;
        let mut text = Vec::with_capacity(2 + 2 + 17 + 17 + lock.len());
        match kind {
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

    /// A received message.
    pub fn received(text: Bytes) -> Self {
        Self(text)
    }

    /// The message as published.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// Origin, kind and lock key; `None` for anything else, such as a hint of a later version.
    pub(crate) fn parse(&self) -> Option<(u64, HintKind, Bytes)> {
        const NUMBER: usize = 16;
        let field = |from: usize| std::str::from_utf8(self.0.get(from..from + NUMBER)?).ok();
        let number = |from| u64::from_str_radix(field(from)?, 16).ok();
        let origin = number(4)?;
        let (kind, lock_at) = match self.0.get(..4)? {
            b"1 w " => (HintKind::Waiting { seconds: None }, 4 + NUMBER + 1),
            b"1 l " => {
                (HintKind::Waiting { seconds: Some(number(4 + NUMBER + 1)?) }, 4 + 2 * (NUMBER + 1))
            }
            prefix @ (b"1 r " | b"1 y ") => {
                let t = FencingToken::parse(field(4 + NUMBER + 1)?.as_bytes())?;
                (HintKind::Released { t, waiting: prefix == b"1 y " }, 4 + 2 * (NUMBER + 1))
            }
            _ => return None,
        };
        let lock = self.0.get(lock_at..).filter(|lock| !lock.is_empty())?;
        (self.0.get(lock_at - 1)? == &b' ').then(|| (origin, kind, Bytes::copy_from_slice(lock)))
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
    fn a_hint_parses_back() {
        let t = FencingToken::MIN;
        let released = [false, true].map(|waiting| HintKind::Released { t, waiting });
        for kind in [None, Some(40)]
            .map(|seconds| HintKind::Waiting { seconds })
            .into_iter()
            .chain(released)
        {
            assert_eq!(Hint::new(7, kind, &lock()).parse(), Some((7, kind, lock())));
        }
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic_the_parser(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Hint::received(Bytes::from(bytes)).parse();
        }

        #[test]
        fn a_valid_prefix_with_noise_does_not_panic_the_parser(kind in "1 [lwry] ", rest in "[0-9a-f ]{0,60}") {
            let _ = Hint::received(Bytes::from(kind + &rest)).parse();
        }
    }
}

//! Hints: messages that gateways send each other through the nodes. A node forwards hints and does
//! not read them.
//!
//! A gateway publishes two kinds:
//!
//! - *Waiting*: somebody waits for this lock at the gateway that sends the hint. The master
//!   publishes the hint when it refuses the waiter's acquire, at first and at every poll. If the
//!   gateway polls slowly, the hint also says for how many seconds it is valid. If waiters there
//!   have [`QueueMode::Newest`](crate::QueueMode), the hint names the newest of them.
//! - *Released*: this lock was released. The master publishes the hint when it runs the release.
//!   The releasing gateway adds the hint only if it has received a *waiting* hint from another
//!   gateway.

use bytes::Bytes;

use crate::model::types::{FencingToken, Owner};

/// The channel of all gateways that share a prefix and a database. The name includes the database
/// because Redis channels span all databases.
#[cfg(feature = "redis")]
pub(crate) fn channel(prefix: &str, database: Option<u8>) -> String {
    match database {
        None | Some(0) => format!("{{{prefix}}}:hints"),
        Some(number) => format!("{{{prefix}}}:hints:{number}"),
    }
}

/// A message between gateways: `1 <kind> <origin> [<fields>] <lock key>`. The origin is a random
/// number that identifies the gateway that publishes the hint. All fields have a fixed width.
///
/// | kind | meaning | fields |
/// | --- | --- | --- |
/// | `w` | waiting | |
/// | `l` | waiting | seconds |
/// | `n` | waiting, with the newest waiter that supersedes others | seconds or 0, arrival, owner |
/// | `r` | released | T |
/// | `y` | released, and somebody waits at the origin, too | T |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint(Bytes);

/// The content of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintKind {
    /// A waiter is at the origin. `seconds` is how long the hint is valid; `None` for the usual
    /// time. `newest` is the waiter there that supersedes others.
    Waiting { seconds: Option<u64>, newest: Option<NewestWaiter> },
    /// The grant with this token was released at the origin. `waiting` is whether somebody waits
    /// for the lock there, too.
    Released { t: FencingToken, waiting: bool },
}

/// The newest waiter with [`QueueMode::Newest`](crate::QueueMode) at a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewestWaiter {
    /// When the waiter arrived, in microseconds since 1970 by the clock of the gateway that sends
    /// the hint. The number is larger if that clock was set back, because each arrival at a gateway
    /// gets a larger number than the one before. A repeated request keeps the number of its first
    /// request.
    pub(crate) arrival: u64,
    /// The owner, if repeated requests may have the same owner.
    pub(crate) shared_owner: Option<Owner>,
}

impl Hint {
    pub(crate) fn new(origin: u64, kind: HintKind, lock: &Bytes) -> Self {
        use std::io::Write;
        let mut text = Vec::with_capacity(2 + 2 + 17 + 17 + lock.len());
        match kind {
            HintKind::Waiting { seconds: None, newest: None } => {
                write!(text, "1 w {origin:016x} ")
            }
            HintKind::Waiting { seconds: Some(seconds), newest: None } => {
                write!(text, "1 l {origin:016x} {seconds:016x} ")
            }
            HintKind::Waiting { seconds, newest: Some(newest) } => {
                let NewestWaiter { arrival, shared_owner } = newest;
                let seconds = seconds.unwrap_or_default();
                let owner = shared_owner.unwrap_or(Owner::NOBODY);
                write!(text, "1 n {origin:016x} {seconds:016x} {arrival:016x} {} ", owner.text())
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
        const SECOND: usize = 4 + NUMBER + 1;
        const THIRD: usize = SECOND + NUMBER + 1;
        const FOURTH: usize = THIRD + NUMBER + 1;
        let field = |from: usize| std::str::from_utf8(self.0.get(from..from + NUMBER)?).ok();
        let number = |from| u64::from_str_radix(field(from)?, 16).ok();
        let origin = number(4)?;
        let (kind, lock_at) = match self.0.get(..4)? {
            b"1 w " => (HintKind::Waiting { seconds: None, newest: None }, SECOND),
            b"1 l " => {
                let seconds = Some(number(SECOND)?);
                (HintKind::Waiting { seconds, newest: None }, THIRD)
            }
            b"1 n " => {
                let seconds = Some(number(SECOND)?).filter(|seconds| *seconds > 0);
                let owner = Owner::parse(self.0.get(FOURTH..FOURTH + Owner::TEXT_LEN)?)?;
                let shared_owner = Some(owner).filter(|owner| *owner != Owner::NOBODY);
                let newest = Some(NewestWaiter { arrival: number(THIRD)?, shared_owner });
                (HintKind::Waiting { seconds, newest }, FOURTH + Owner::TEXT_LEN + 1)
            }
            prefix @ (b"1 r " | b"1 y ") => {
                let t = FencingToken::parse(field(SECOND)?.as_bytes())?;
                (HintKind::Released { t, waiting: prefix == b"1 y " }, THIRD)
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
        let newest = [None, Some(Owner::from_bytes([0xa5; 16]))].map(|shared_owner| {
            Some(NewestWaiter { arrival: 1_763_725_165_123_456, shared_owner })
        });
        let waiting = [None, newest[0], newest[1]].into_iter().flat_map(|newest| {
            [None, Some(40)].map(|seconds| HintKind::Waiting { seconds, newest })
        });
        for kind in waiting.chain(released) {
            assert_eq!(Hint::new(7, kind, &lock()).parse(), Some((7, kind, lock())));
        }
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic_the_parser(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Hint::received(Bytes::from(bytes)).parse();
        }

        #[test]
        fn a_valid_prefix_with_noise_does_not_panic_the_parser(kind in "1 [lnwry] ", rest in "[0-9a-f ]{0,100}") {
            let _ = Hint::received(Bytes::from(kind + &rest)).parse();
        }
    }
}

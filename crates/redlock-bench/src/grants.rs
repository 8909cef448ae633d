//! The grants of one lock, laid side by side: whether they exclude one another in the order of their fencing tokens, how
//! often the lock changed hands, and who went without. Pure: knows neither requests nor processes.
//!
//! All times are of one monotonic clock, this machine's, whatever connection and thread they were taken on. A grant is
//! taken to last from the moment its answer was read until just before its release was sent: somewhat shorter than what
//! the gateway promised, so an overlap is a broken promise and no artefact of measuring.

use std::time::{Duration, Instant};

/// One grant of the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub(crate) fencing_token: u64,
    pub(crate) worker: u32,
    /// When the first request of this want was sent.
    pub(crate) wanted: Instant,
    pub(crate) received: Instant,
    pub(crate) released: Instant,
}

impl Grant {
    pub(crate) fn wait(&self) -> Duration {
        self.received - self.wanted
    }
}

/// Reads T out of `1.<T>.<owner>`, without the cost of parsing a body.
pub(crate) fn fencing_token(lock_token: &[u8]) -> Option<u64> {
    let mut parts = lock_token.split(|&byte| byte == b'.');
    let (version, fencing, _owner) = (parts.next()?, parts.next()?, parts.next()?);
    (version == b"1").then_some(())?;
    std::str::from_utf8(fencing).ok()?.parse().ok()
}

/// Pairs of neighbours in the order of fencing tokens of which the later one was not granted after the earlier one's
/// release, or has no larger token. None of them means that all grants exclude one another and that tokens rise.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Violations {
    pub(crate) count: u64,
    pub(crate) first: Option<String>,
}

impl Violations {
    /// `grants` must be in the order of their fencing tokens.
    pub(crate) fn among(grants: &[Grant]) -> Self {
        let mut found = Self::default();
        for pair in grants.windows(2) {
            let (earlier, later) = (&pair[0], &pair[1]);
            let problem = if earlier.fencing_token == later.fencing_token {
                "have the same fencing token".to_owned()
            } else if later.received < earlier.released {
                let by = earlier.released - later.received;
                format!("overlap by {by:?}, or their fencing tokens {} do not rise", later.fencing_token)
            } else {
                continue;
            };
            found.count += 1;
            found.first.get_or_insert_with(|| {
                format!(
                    "grants {} of worker {} and {} of worker {} {problem}",
                    earlier.fencing_token, earlier.worker, later.fencing_token, later.worker
                )
            });
        }
        found
    }
}

/// Grants within `[from, until)` that went to another worker than the one before. `grants` must be in the order of
/// their fencing tokens.
pub(crate) fn handoffs(grants: &[Grant], from: Instant, until: Instant) -> usize {
    grants
        .windows(2)
        .filter(|pair| pair[0].worker != pair[1].worker && (from..until).contains(&pair[1].received))
        .count()
}

/// The longest time that one of the workers was without a grant, ending in `[from, until)` or not ended by then; waiting
/// begins at `start` for all.
pub(crate) fn longest_without(
    grants: &[Grant],
    workers: u32,
    start: Instant,
    from: Instant,
    until: Instant,
) -> Duration {
    let mut last = vec![start; workers as usize];
    let mut longest = Duration::ZERO;
    let mut received: Vec<_> = grants.iter().map(|grant| (grant.received, grant.worker)).collect();
    received.sort_unstable();
    for (at, worker) in received.into_iter().take_while(|&(at, _)| at < until) {
        if at >= from {
            longest = longest.max(at - last[worker as usize]);
        }
        last[worker as usize] = at;
    }
    last.into_iter().map(|at| until - at).fold(longest, Duration::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A grant of that token, received and released so many ms after the start.
    fn grant(start: Instant, fencing_token: u64, worker: u32, received: u64, released: u64) -> Grant {
        let at = |ms| start + Duration::from_millis(ms);
        Grant { fencing_token, worker, wanted: start, received: at(received), released: at(released) }
    }

    #[test]
    fn a_fencing_token_is_read_out_of_the_lock_token_only() {
        assert_eq!(fencing_token(b"1.1795264376745353.c0d2"), Some(1_795_264_376_745_353));
        for other in ["", "1", "1.2", "2.3.a", "1.-3.a", "1..a", "c0d2f690d3e7"] {
            assert_eq!(fencing_token(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn grants_one_after_another_violate_nothing() {
        let start = Instant::now();
        let grants = [grant(start, 5, 0, 1, 2), grant(start, 7, 1, 2, 3), grant(start, 8, 1, 9, 9)];
        assert_eq!(Violations::among(&grants), Violations::default());
    }

    #[test]
    fn overlaps_sinking_tokens_and_duplicates_are_violations() {
        let start = Instant::now();
        let overlap = [grant(start, 5, 0, 1, 3), grant(start, 6, 1, 2, 4)];
        let sinking = [grant(start, 5, 0, 5, 6), grant(start, 6, 1, 1, 2)];
        let twice = [grant(start, 5, 0, 1, 2), grant(start, 5, 1, 3, 4)];
        for grants in [overlap, sinking, twice] {
            let found = Violations::among(&grants);
            assert_eq!(found.count, 1, "{grants:?}");
            assert!(found.first.expect("one is shown").contains("of worker 1"));
        }
    }

    #[test]
    fn a_lock_that_comes_back_to_its_releaser_was_not_handed_off() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let grants = [
            grant(start, 1, 0, 1, 1),
            grant(start, 2, 1, 2, 2),
            grant(start, 3, 1, 3, 3),
            grant(start, 4, 0, 4, 4),
            grant(start, 5, 1, 5, 5),
        ];
        assert_eq!(handoffs(&grants, at(0), at(9)), 3);
        assert_eq!(handoffs(&grants, at(2), at(5)), 2);
    }

    #[test]
    fn a_wait_that_is_open_at_the_end_counts() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let grants = [grant(start, 1, 0, 2, 2), grant(start, 2, 0, 10, 10), grant(start, 3, 1, 12, 12)];
        let longest = |workers, from, until| longest_without(&grants, workers, start, at(from), at(until)).as_millis();
        assert_eq!(longest(2, 0, 13), 12, "worker 1 until its grant");
        assert_eq!(longest(3, 0, 20), 20, "worker 2 never had one");
        assert_eq!(longest(1, 3, 9), 7, "open at the end");
        assert_eq!(longest(2, 3, 40), 30, "worker 0 since its last");
    }
}

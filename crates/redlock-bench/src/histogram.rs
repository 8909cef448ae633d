//! Latencies on a logarithmic scale: 32 buckets for each power of two of nanoseconds, so that what is read back is at
//! most 1.6 % off wherever it lies. Constant size, no allocation while recording, and histograms add up.

use std::time::Duration;

/// log2 of the buckets per power of two.
const FINE: u32 = 5;
const BUCKETS: usize = ((64 - FINE as usize) + 1) << FINE;

/// Counts per bucket.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Box<[u32]>,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into() }
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.counts[bucket(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX))] += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().map(|&count| u64::from(count)).sum()
    }

    /// The latency that a share of all did not exceed (nearest rank); `share` in `0.0..=1.0`. `None` when empty.
    pub(crate) fn percentile(&self, share: f64) -> Option<Duration> {
        let total = self.total();
        let rank = ((share * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        let at = self.counts.iter().position(|&count| {
            seen += u64::from(count);
            seen >= rank
        })?;
        Some(Duration::from_nanos(middle(at)))
    }
}

/// Values below 2^FINE have a bucket each; above, the highest FINE + 1 bits decide.
fn bucket(nanos: u64) -> usize {
    let shift = nanos.checked_ilog2().unwrap_or(0).saturating_sub(FINE);
    ((shift as usize) << FINE) + (nanos >> shift) as usize
}

fn middle(bucket: usize) -> u64 {
    let shift = (bucket >> FINE).saturating_sub(1);
    let low = ((bucket - (shift << FINE)) as u64) << shift;
    low + ((1u64 << shift) >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_back_is_close_on_the_whole_scale() {
        let mut value = 1u64;
        while value < u64::MAX / 3 {
            for value in [value, value * 3 / 2, value * 2 - 1] {
                let read = middle(bucket(value));
                assert!(read.abs_diff(value) as f64 <= value as f64 / 62.0, "{value} is read back as {read}");
            }
            value *= 2;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn buckets_rise_without_gaps() {
        let mut last = bucket(0);
        for value in 1..100_000 {
            let this = bucket(value);
            assert!(this == last || this == last + 1, "{value} falls into {this} after {last}");
            last = this;
        }
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.percentile(0.5), None);
        for micros in 1..=100 {
            histogram.record(Duration::from_micros(micros));
        }
        let mut slow = Histogram::new();
        slow.record(Duration::from_secs(2));
        histogram.add(&slow);
        let near = |share: f64, expected: f64| {
            let read = histogram.percentile(share).expect("not empty").as_secs_f64() * 1e6;
            assert!((read / expected - 1.0).abs() <= 1.0 / 62.0, "p{share}: {read} µs, not {expected}");
        };
        near(0.0, 1.0);
        near(0.5, 51.0);
        near(0.99, 100.0);
        near(1.0, 2_000_000.0);
    }
}

//! Time and randomness. The algorithm reads both only through the traits [`Clock`] and [`Entropy`],
//! so that a simulation can replace them.
//!
//! [`HybridClock`] mints the fencing tokens. Tokens strictly increase within one process, unless
//! the wall clock steps back by more than `max_clock_skew` (see [`HybridClock::mint`]). Across
//! gateways, the token watermarks on the nodes ensure that the tokens of each lock increase.
//!
//! The clock also learns. If a node stores a token that is ahead of our wall clock, new tokens run
//! ahead of the wall clock as well, by at most [`MAX_LEAD`]. Without this lead, the gateway with
//! the slower of two clocks would lose every first attempt. The lead halves every
//! [`LEAD_HALF_LIFE`]. Otherwise one gateway whose clock was ahead for a minute would leave all
//! gateways ahead for ever, because they learn the lead from each other. Nodes with slower clocks
//! would then refuse their tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::model::types::{FencingToken, Nonce, Owner};

/// Source of time.
pub trait Clock: Send + Sync + 'static {
    /// Time since an arbitrary fixed point. Never goes back, and includes the time the machine is
    /// suspended.
    fn monotonic(&self) -> Duration;

    /// Microseconds since 1970 by the machine's wall clock.
    fn wall_micros(&self) -> u64;
}

/// The machine's own clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    /// Reads CLOCK_BOOTTIME on Linux, which also counts the time for which the machine is
    /// suspended. `std::time::Instant` stops then. A holder that wakes up after the end of its
    /// lease would not notice.
    fn monotonic(&self) -> Duration {
        #[cfg(target_os = "linux")]
        let id = rustix::time::ClockId::Boottime;
        #[cfg(not(target_os = "linux"))]
        let id = rustix::time::ClockId::Monotonic;
        let now = rustix::time::clock_gettime(id);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
    }

    fn wall_micros(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
    }
}

/// Source of randomness for owners, nonces and jitter.
pub trait Entropy: Send + Sync + 'static {
    /// Fills the buffer with bytes that nobody can guess.
    fn fill(&self, buffer: &mut [u8]);

    /// An owner that nobody else can guess.
    fn owner(&self) -> Owner {
        let mut raw = [0; Owner::LEN];
        self.fill(&mut raw);
        Owner::from_bytes(raw)
    }

    /// A nonce, which distinguishes one proposal of an owner from the owner's other proposals.
    fn nonce(&self) -> Nonce {
        let mut raw = [0; Nonce::LEN];
        self.fill(&mut raw);
        Nonce::from_bytes(raw)
    }

    /// An owner and the nonce of its first proposal, drawn in one call.
    fn owner_and_nonce(&self) -> (Owner, Nonce) {
        let mut raw = [0; Owner::LEN + Nonce::LEN];
        self.fill(&mut raw);
        let (owner, nonce) = raw.split_at(Owner::LEN);
        let halves = (owner.try_into(), nonce.try_into());
        let (Ok(owner), Ok(nonce)) = halves else { unreachable!("both parts have their length") };
        (Owner::from_bytes(owner), Nonce::from_bytes(nonce))
    }

    /// A number in `0.0..1.0`.
    fn unit(&self) -> f64 {
        let mut raw = [0; 8];
        self.fill(&mut raw);
        (u64::from_le_bytes(raw) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The operating system's generator.
#[derive(Debug, Clone, Copy, Default)]
pub struct OsEntropy;

impl Entropy for OsEntropy {
    /// Jitter is no secret, so it needs no system call.
    fn unit(&self) -> f64 {
        fastrand::f64()
    }

    fn fill(&self, buffer: &mut [u8]) {
        // A generator inside this process would save a system call. But two copies of one machine,
        // resumed from the same snapshot, would then draw the same owner for two holders. Without
        // randomness the service would hand out guessable owners, so the process must not go on.
        getrandom::fill(buffer).expect("the operating system's random generator failed");
    }
}

/// How far tokens seen on nodes may move our own clock ahead.
pub const MAX_LEAD: Duration = Duration::from_secs(1);

/// The time in which half of a lead decays.
pub const LEAD_HALF_LIFE: Duration = Duration::from_secs(60);

/// The part of a lead that is left when the time `since` has passed. The lead decays slower than
/// time passes, so wall clock plus lead never goes back. A gateway that learns a lead from another
/// gateway learns only what is left of it. So a lead that gateways learn from each other decays
/// too.
pub(crate) fn lead_left(lead_micros: u64, since: Duration) -> u64 {
    if lead_micros == 0 {
        return 0;
    }
    (lead_micros as f64 * (-since.as_secs_f64() / LEAD_HALF_LIFE.as_secs_f64()).exp2()) as u64
}

/// A lead and the time at which it was learned, in one word of 64 bits. The low 20 bits hold the
/// lead in microseconds, at most [`MAX_LEAD`]. The high 44 bits hold the time, in milliseconds of
/// the monotonic clock.
#[derive(Default)]
struct Lead(AtomicU64);

impl Lead {
    const BITS: u32 = 20;

    fn left(word: u64, now: Duration) -> u64 {
        let learned = Duration::from_millis(word >> Self::BITS);
        lead_left(word & ((1 << Self::BITS) - 1), now.saturating_sub(learned))
    }

    fn micros(&self, now: impl FnOnce() -> Duration) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            0 => 0,
            word => Self::left(word, now()),
        }
    }

    fn learn(&self, micros: u64, now: Duration) {
        let word = (now.as_millis() as u64) << Self::BITS | micros.min(MAX_LEAD.as_micros() as u64);
        let larger = |known| (Self::left(known, now) < micros).then_some(word);
        // Unchanged if the known lead is larger.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, larger);
    }
}

/// Mints fencing tokens: T = max(last T minted or seen + 1, wall clock + learned lead).
pub struct HybridClock {
    clock: Arc<dyn Clock>,
    /// `max_clock_skew`. A node refuses a T further than this from its own time, so this clock does
    /// not continue from such a T.
    max_offset_micros: u64,
    last: AtomicU64,
    lead: Lead,
}

impl HybridClock {
    /// `max_offset` is `max_clock_skew`: a node refuses a T further than that from its own time.
    pub fn new(clock: Arc<dyn Clock>, max_offset: Duration) -> Self {
        Self {
            clock,
            max_offset_micros: max_offset.as_micros() as u64,
            last: AtomicU64::new(0),
            lead: Lead::default(),
        }
    }

    /// Returns a token larger than every token that this clock has minted or observed. There is one
    /// exception: the wall clock was set back, so that the last token lies more than
    /// `max_clock_skew` ahead of it. Nodes would refuse a token larger than that, so the new token
    /// follows the wall clock. The watermarks on the nodes keep the order of each lock anyway.
    /// `None` if the wall clock is outside the years 2001 to 2255.
    pub fn mint(&self) -> Option<FencingToken> {
        let now = self.clock.wall_micros() + self.lead.micros(|| self.clock.monotonic());
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            let next = if last > now + self.max_offset_micros { now } else { now.max(last + 1) };
            match self.last.compare_exchange_weak(last, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return FencingToken::new(next).ok(),
                Err(newer) => last = newer,
            }
        }
    }

    /// Learns a token stored on a node, so that the next minted token is larger. Returns false, and
    /// learns nothing, if the token lies more than ¾ `max_clock_skew` ahead of our wall clock.
    /// Without this limit, one wild watermark could move the tokens of all locks out of the range
    /// that nodes accept. The last quarter of `max_clock_skew` is left for nodes whose clocks are
    /// behind ours.
    pub fn observe(&self, seen: FencingToken) -> bool {
        let wall = self.clock.wall_micros();
        let ahead = seen.get().saturating_sub(wall);
        if ahead > self.max_offset_micros / 4 * 3 {
            return false;
        }
        if ahead > 0 {
            self.lead.learn(ahead, self.clock.monotonic());
        }
        self.last.fetch_max(seen.get(), Ordering::Relaxed);
        true
    }

    /// How far newly minted tokens lie ahead of the wall clock.
    pub(crate) fn lead(&self) -> Duration {
        let wall = self.clock.wall_micros();
        let learned = self.lead.micros(|| self.clock.monotonic());
        let minted = self.last.load(Ordering::Relaxed).saturating_sub(wall);
        // `mint` does not continue from a last token that is further ahead.
        let minted = if minted > self.max_offset_micros { 0 } else { minted };
        Duration::from_micros(learned.max(minted))
    }

    /// How far a token lies ahead of our wall clock.
    pub(crate) fn ahead(&self, token: FencingToken) -> Duration {
        Duration::from_micros(token.get().saturating_sub(self.clock.wall_micros()))
    }

    /// Whether a node with a clock like ours may have granted this token: it is at most
    /// `max_clock_skew` ahead.
    pub fn is_credible(&self, token: FencingToken) -> bool {
        token.get() <= self.clock.wall_micros() + self.max_offset_micros
    }

    /// Time since a token was minted, by our wall clock.
    pub fn age(&self, token: FencingToken) -> Duration {
        Duration::from_micros(self.clock.wall_micros().saturating_sub(token.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(AtomicU64);

    impl Clock for Fixed {
        fn monotonic(&self) -> Duration {
            Duration::from_micros(self.wall_micros())
        }
        fn wall_micros(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    const WALL: u64 = 1_763_725_165_000_000;

    fn clock() -> (Arc<Fixed>, HybridClock) {
        let fixed = Arc::new(Fixed(AtomicU64::new(WALL)));
        (fixed.clone(), HybridClock::new(fixed, Duration::from_secs(2)))
    }

    #[test]
    fn tokens_increase_when_the_wall_clock_stands_or_steps_back() {
        let (wall, clock) = clock();
        let first = clock.mint().unwrap();
        let second = clock.mint().unwrap();
        wall.0.store(WALL - 1_900_000, Ordering::Relaxed);
        let third = clock.mint().unwrap();
        assert!(first.get() == WALL && second > first && third > second);
    }

    #[test]
    fn a_seen_token_moves_the_clock_and_the_lead_is_capped() {
        let (wall, clock) = clock();
        assert!(clock.observe(FencingToken::new(WALL + 500_000).unwrap()));
        assert_eq!(clock.mint().unwrap().get(), WALL + 500_001);
        wall.0.store(WALL + 1_000_000, Ordering::Relaxed);
        let lead = clock.mint().unwrap().get() - WALL - 1_000_000;
        assert!((490_000..500_000).contains(&lead), "nearly all of the 0.5 s remains: {lead}");
        assert!(clock.observe(FencingToken::new(WALL + 2_400_000).unwrap()));
        wall.0.store(WALL + 3_000_000, Ordering::Relaxed);
        let lead = clock.mint().unwrap().get() - WALL - 3_000_000;
        assert!((970_000..1_000_000).contains(&lead), "it is capped at 1 s: {lead}");
    }

    /// One gateway is 1 s ahead for a moment. The other gateways learn the lead from its
    /// watermarks. Then all learn it from each other's watermarks, also across restarts.
    #[test]
    fn a_lead_that_gateways_learn_from_each_other_decays() {
        let (wall, one) = clock();
        assert!(one.observe(FencingToken::new(WALL + 1_000_000).unwrap()));
        let mut others = [HybridClock::new(wall.clone(), Duration::from_secs(2)), one];
        for minute in 1..=20u64 {
            for tenth in 0..600u64 {
                wall.0.store(WALL + minute * 60_000_000 + tenth * 100_000, Ordering::Relaxed);
                let [one, other] = &others;
                assert!(one.observe(other.mint().unwrap()) && other.observe(one.mint().unwrap()));
            }
            // A rolling restart.
            others = others.map(|old| {
                let new = HybridClock::new(wall.clone(), Duration::from_secs(2));
                assert!(new.observe(old.mint().unwrap()));
                new
            });
        }
        let lead = others[0].mint().unwrap().get() - wall.wall_micros();
        assert!(lead < 1_000, "{lead} µs after 20 minutes");
    }

    #[test]
    fn one_wild_watermark_does_not_move_all_tokens() {
        let (_, clock) = clock();
        assert!(!clock.observe(FencingToken::new(WALL + 1_500_001).unwrap()));
        assert!(!clock.observe(FencingToken::MAX));
        assert_eq!(clock.mint().unwrap().get(), WALL);
    }

    #[test]
    fn a_wall_clock_once_far_ahead_does_not_stop_all_locks() {
        let (wall, clock) = clock();
        wall.0.store(WALL + 3_600_000_000, Ordering::Relaxed);
        clock.mint().unwrap();
        wall.0.store(WALL + 1_000, Ordering::Relaxed);
        let tokens = [clock.mint().unwrap().get(), clock.mint().unwrap().get()];
        assert_eq!(tokens, [WALL + 1_000, WALL + 1_001]);
    }
}

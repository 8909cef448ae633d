//! The bounds of a history, and the model within them.

use redlock_core::quorum::Quorum;

use crate::explore::First;
use crate::node::Token;
use crate::rules::Rules;

/// Number of masters.
pub const NODES: usize = 3;
/// Number of proposals: two of owner A, one of owner B.
pub const PROPOSALS: usize = 3;
/// Maximum number of extensions in one history.
pub const RENEWALS: usize = 2;
/// Maximum number of readings for nodes that catch up.
pub const CATCH_UPS: usize = 2;

/// The bounds of one history.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Whether A asks a second time.
    pub retry: bool,
    /// Number of losses of data, on any nodes.
    pub losses: u8,
    /// Number of extensions in one history, at most [`RENEWALS`].
    pub renewals: usize,
    /// Whether the gateway of B may have a clock that is far ahead.
    pub bad_clock: bool,
    /// Whether extensions only confirm: the second request of A confirms the grant of its first, or
    /// the other way round. No holder extends.
    pub only_confirms: bool,
    /// Whether proposals may be given up and locks released.
    pub releases: bool,
    /// Whether the release of a holder keeps the lock from everybody for a while.
    pub holds: bool,
    /// Whether a node that lost its data may recover the others' locks instead of waiting until all
    /// leases have ended.
    pub recovery: bool,
    /// Number of readings for nodes that catch up, at most [`CATCH_UPS`].
    pub catch_ups: usize,
    /// The tokens of the proposals; `None` explores all their orders.
    pub tokens: Option<[Token; PROPOSALS]>,
    /// Whether watermarks may expire. Not together with both a retry and extensions: the retry
    /// could then confirm a grant that was released.
    pub watermarks_end: bool,
    /// Whether every order of events is explored, even orders in which no more can go wrong than in
    /// others.
    pub every_order: bool,
}

impl Bounds {
    /// All three proposals, nothing else.
    pub const PROPOSALS: Self = Self {
        retry: true,
        losses: 0,
        renewals: 0,
        bad_clock: true,
        only_confirms: false,
        releases: true,
        holds: false,
        recovery: false,
        catch_ups: 0,
        tokens: None,
        watermarks_end: false,
        every_order: false,
    };
}

/// The model.
#[derive(Debug)]
pub struct Locks {
    pub(super) rules: Rules,
    pub(super) bounds: Bounds,
    pub(super) quorum: Quorum,
    pub(super) firsts: [First; 13],
}

impl Locks {
    pub fn new(rules: Rules, bounds: Bounds) -> Self {
        let quorum = Quorum::new(NODES).expect("three nodes are allowed");
        let renewals = bounds.renewals.min(RENEWALS);
        let catch_ups = bounds.catch_ups.min(CATCH_UPS);
        let bounds = Bounds { renewals, catch_ups, ..bounds };
        Self { rules, bounds, quorum, firsts: Default::default() }
    }
}

//! How much may happen, and the model within these bounds.

use redlock_core::quorum::Quorum;

use crate::explore::First;
use crate::node::Token;
use crate::rules::Rules;

/// Masters.
pub const NODES: usize = 3;
/// Attempts: two of owner A, one of owner B.
pub const TRIES: usize = 3;
/// Most extensions, of whichever grants.
pub const RENEWALS: usize = 2;
/// Most readings for nodes that catch up.
pub const CATCH_UPS: usize = 2;

/// How much may happen in one history.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Whether A asks a second time.
    pub retry: bool,
    /// Losses of data, of any nodes.
    pub losses: u8,
    /// Extensions, of any grants, at most [`RENEWALS`].
    pub renewals: usize,
    /// Whether the gateway of B may have a clock that is far ahead.
    pub bad_clock: bool,
    /// Whether extensions are only those by which one request of A confirms the grant of its other.
    pub only_confirms: bool,
    /// Whether tries may be given up and locks released.
    pub releases: bool,
    /// Whether a node that lost its data may recover what the others store, instead of waiting until all leases have ended.
    pub recovery: bool,
    /// Readings for nodes that catch up with what a majority of the others stores, at most [`CATCH_UPS`].
    pub catch_ups: usize,
    /// The only tokens that the tries ask with, instead of all orders of them.
    pub tokens: Option<[Token; TRIES]>,
    /// Whether fences may end. Not together with a retry and extensions: one may then confirm what the other has released.
    pub fences_end: bool,
    /// Whether every order of events is explored, instead of those that cover the others.
    pub every_order: bool,
}

impl Bounds {
    /// All three tries, nothing else.
    pub const TRIES: Self = Self {
        retry: true,
        losses: 0,
        renewals: 0,
        bad_clock: true,
        only_confirms: false,
        releases: true,
        recovery: false,
        catch_ups: 0,
        tokens: None,
        fences_end: false,
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
    /// With these bounds.
    pub fn new(rules: Rules, bounds: Bounds) -> Self {
        let quorum = Quorum::new(NODES).expect("three nodes are allowed");
        let renewals = bounds.renewals.min(RENEWALS);
        let catch_ups = bounds.catch_ups.min(CATCH_UPS);
        let bounds = Bounds { renewals, catch_ups, ..bounds };
        Self { rules, bounds, quorum, firsts: Default::default() }
    }
}

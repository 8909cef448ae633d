//! Counting votes: pure arithmetic.
//!
//! A count has one of three results. A majority of all *configured* nodes say yes; or so many say
//! no that a majority of yes is impossible; or neither. A node that failed to answer counts neither
//! as a yes nor as a no, because a time-out is not a refusal.

/// A number of nodes outside 1 to [`Quorum::MAX_NODES`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given} nodes given; allowed are 1 to {max}", max = Quorum::MAX_NODES)]
pub struct NodeCountError {
    /// The number of nodes given.
    pub given: usize,
}

/// The number of nodes, and the sizes of sets of nodes that follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quorum {
    nodes: usize,
}

impl Quorum {
    /// The largest number of masters. More masters would add latency and no safety. A round keeps
    /// sets of nodes in the 32 bits of a `u32`.
    pub const MAX_NODES: usize = 32;

    /// A cluster of `nodes` nodes.
    ///
    /// # Errors
    /// [`NodeCountError`] outside 1 to [`Quorum::MAX_NODES`].
    pub fn new(nodes: usize) -> Result<Self, NodeCountError> {
        if (1..=Self::MAX_NODES).contains(&nodes) {
            Ok(Self { nodes })
        } else {
            Err(NodeCountError { given: nodes })
        }
    }

    /// N, all configured nodes.
    pub fn nodes(self) -> usize {
        self.nodes
    }

    /// ⌊N/2⌋ + 1: any two sets of this size share a node.
    pub fn size(self) -> usize {
        self.nodes / 2 + 1
    }

    /// N − quorum + 1: once this many nodes say no, no majority can say yes.
    pub fn blocking(self) -> usize {
        self.nodes - self.size() + 1
    }

    /// The decision that the votes so far force, if any.
    pub fn decide(self, tally: Tally) -> Decision {
        let open = self.nodes - tally.yes - tally.no - tally.failed;
        if tally.yes >= self.size() {
            Decision::Yes
        } else if tally.no >= self.blocking() {
            Decision::No
        } else if tally.yes + open < self.size() && tally.no + open < self.blocking() {
            Decision::Neither
        } else {
            Decision::Open
        }
    }
}

/// Votes counted so far. The other votes are outstanding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Nodes that did what was asked or, for an inspection, that store the same holder.
    pub yes: usize,
    /// Definite refusals.
    pub no: usize,
    /// No usable answer: down, timed out, quarantined, overloaded, error.
    pub failed: usize,
}

/// The decision of a tally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// A majority says yes.
    Yes,
    /// Refusals alone make a majority of yes impossible.
    No,
    /// Neither yes nor no is possible any more.
    Neither,
    /// The outstanding votes can still decide.
    Open,
}

impl Decision {
    /// The word for traces; `None` while the decision is open.
    pub(crate) fn word(self) -> Option<&'static str> {
        match self {
            Self::Yes => Some("yes"),
            Self::No => Some("no"),
            Self::Neither => Some("neither"),
            Self::Open => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every tally of every cluster up to 9 nodes with the definition: a decision is
    /// forced when all completions of the open votes agree on it.
    #[test]
    fn decisions_are_exactly_the_forced_ones() {
        for nodes in 1..=9usize {
            let quorum = Quorum::new(nodes).unwrap();
            assert!(2 * quorum.size() > nodes && quorum.size() + quorum.blocking() == nodes + 1);
            for yes in 0..=nodes {
                for no in 0..=nodes - yes {
                    for failed in 0..=nodes - yes - no {
                        let open = nodes - yes - no - failed;
                        let mut finals = Vec::new();
                        for more_yes in 0..=open {
                            for more_no in 0..=open - more_yes {
                                finals.push(if yes + more_yes >= quorum.size() {
                                    Decision::Yes
                                } else if no + more_no >= quorum.blocking() {
                                    Decision::No
                                } else {
                                    Decision::Neither
                                });
                            }
                        }
                        let expected = if finals.iter().all(|f| *f == finals[0]) {
                            finals[0]
                        } else {
                            Decision::Open
                        };
                        assert_eq!(
                            quorum.decide(Tally { yes, no, failed }),
                            expected,
                            "{nodes} {yes} {no} {failed}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_are_majorities_of_the_configured_nodes() {
        let sizes: Vec<_> = (1..=6).map(|n| Quorum::new(n).unwrap().size()).collect();
        assert_eq!(sizes, [1, 2, 2, 3, 3, 4]);
        assert!(Quorum::new(0).is_err() && Quorum::new(33).is_err());
    }
}

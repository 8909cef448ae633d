//! Raises `max_ttl` without stopping votes. Every marker states two lengths, see
//! [`TtlBounds`]: the bound that quarantines wait for, and the limit of TTLs that gateways grant.
//!
//! 1. The bound rises on every master, one after the other.
//! 2. Only then the limit rises on every master.
//!
//! So when the first lock with a longer TTL is granted, every master has the larger bound. A gateway
//! ends a quarantine only after it has probed a majority, so it sees the bound on a master that has
//! kept its data. That covers a gateway with the smaller `max_ttl` that was just started, and an
//! interrupted run.
//!
//! Calls name only the incarnation in a marker, which stays the same. So sessions go on, and no
//! request fails. A master that has just lost its data gets a new marker from a gateway first, and
//! is raised then.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::model::clock::SystemClock;
use crate::node::eligibility::TtlBounds;
use crate::node::link::{LinkError, MarkerSwap, ProbeReply, Swapped};
use crate::node::probe::Master;

/// The pause before a master is probed again that could not be raised.
const PAUSE: Duration = Duration::from_millis(200);
/// How long one master may stay away or without a marker.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why a master's marker was not raised. The first text is the name of the master.
pub(super) enum NotRaised {
    /// The marker belongs to another configuration by now.
    Overtaken(String),
    /// The marker could not be raised in time; contains the last reason.
    TooLate(String, String),
}

/// Raises the bounds in the markers of all masters. `report` gets the name of a master that cannot
/// be raised yet, and why.
pub(super) async fn raise(
    masters: &[&Master],
    max_ttl: Duration,
    mut report: impl FnMut(&str, &str),
) -> Result<(), NotRaised> {
    let first = TtlBounds { limit: Duration::ZERO, bound: max_ttl };
    let both = TtlBounds::both(max_ttl);
    if masters[0].settings.rules().bounds_rise_first {
        for master in masters {
            raise_one(master, first, &mut report).await?;
        }
    }
    // A master that was recovered meanwhile may have got the old limit again. So the passes repeat
    // until one finds every marker raised.
    loop {
        let mut has_raised = false;
        for master in masters {
            has_raised |= raise_one(master, both, &mut report).await?;
        }
        if !has_raised {
            return Ok(());
        }
    }
}

/// Returns whether the marker had to be raised.
async fn raise_one(
    master: &Master,
    bounds: TtlBounds,
    report: &mut impl FnMut(&str, &str),
) -> Result<bool, NotRaised> {
    let config = master.identity.cluster_config();
    let deadline = Instant::now() + PATIENCE;
    let mut said = String::new();
    loop {
        let why = match probe(master).await {
            Ok(ProbeReply { marker: None, .. }) => {
                "it has no marker; a running gateway writes one".to_owned()
            }
            Ok(ProbeReply { facts, marker: Some(marker), .. }) => {
                let Some(raised) = config.raised(&marker, bounds) else {
                    return Err(NotRaised::Overtaken(master.name.clone()));
                };
                if raised == marker {
                    return Ok(false);
                }
                let swap = MarkerSwap {
                    run_id: facts.run_id,
                    from: Some(marker),
                    to: raised,
                    probed_micros: facts.time_micros,
                };
                match master.swap(swap).await {
                    Ok(Swapped::Done) => return Ok(true),
                    Ok(Swapped::OtherMarker | Swapped::OtherProcess) => {
                        "its marker was changed just now".to_owned()
                    }
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() >= deadline {
            return Err(NotRaised::TooLate(master.name.clone(), why));
        }
        if why != said {
            report(&master.name, &why);
            said = why;
        }
        sleep(PAUSE).await;
    }
}

async fn probe(master: &Master) -> Result<ProbeReply, LinkError> {
    master.probe_with_offset(&SystemClock).await.map(|(reply, _)| reply)
}

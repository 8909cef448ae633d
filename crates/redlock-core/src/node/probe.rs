//! One master as an operator's command talks to it: without a worker, over a connection for each question.

use std::sync::Arc;
use std::time::Duration;

use super::eligibility::{Eligibility, Facts, Moment, NextStep, NodeIdentity};
use super::link::{Link, LinkError, MarkerSwap, ProbeReply, Swapped};
use super::{Diagnosis, Engine, NodeSettings};
use crate::model::clock::{Clock, Entropy};

/// A master, and what it is in a configuration.
#[derive(Clone)]
pub struct Master {
    /// `host:port` or another name that is fit for logs; what tells masters apart.
    pub name: String,
    /// What its marker must say.
    pub identity: NodeIdentity,
    /// What sets the length of a quarantine.
    pub settings: NodeSettings,
    /// One question takes no longer, if the master is there at all.
    pub call_deadline: Duration,
    /// The way to it.
    pub link: Arc<dyn Link>,
}

/// What there is to know of a master before a gateway starts.
#[derive(Debug, Clone)]
pub struct Probe {
    /// What it said about itself.
    pub facts: Facts,
    /// The marker that stands there.
    pub marker: Option<String>,
    /// What a gateway that started now would make of it.
    pub verdict: Verdict,
    /// Its clock minus ours, in microseconds.
    pub clock_offset_micros: i64,
    /// Who would run the rules of locks on it; `None` where they cannot be loaded.
    pub engine: Option<Engine>,
}

/// What a gateway that starts now would do with a master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Let it vote.
    Admitted,
    /// Let it vote after so long, counted from the gateway's start.
    Quarantined(Duration, Diagnosis),
    /// Not let it vote.
    Refused(Diagnosis),
}

impl Master {
    /// Looks at it without changing anything that is stored.
    ///
    /// # Errors
    /// What its link says, or that it did not answer in time.
    pub async fn probe(
        &self,
        clock: &dyn Clock,
        entropy: &dyn Entropy,
    ) -> Result<Probe, LinkError> {
        let (ProbeReply { facts, marker, .. }, clock_offset_micros) = self.look(clock).await?;
        let verdict = self.verdict(
            &facts,
            marker.clone(),
            Moment { monotonic: Duration::ZERO, ..Moment::of(clock) },
            entropy,
        );
        let load = async { self.link.connect().await?.load(&facts.run_id, "").await };
        let engine = self.in_time(load).await.ok();
        Ok(Probe { facts, marker, verdict, clock_offset_micros, engine })
    }

    /// What there is to see, and its clock minus ours in microseconds.
    pub(crate) async fn look(&self, clock: &dyn Clock) -> Result<(ProbeReply, i64), LinkError> {
        self.in_time(async {
            let session = self.link.connect().await?;
            let look = session.look().await?;
            let before = clock.wall_micros() as i64;
            let node = session.time_micros().await?;
            Ok((look, node - (before + clock.wall_micros() as i64) / 2))
        })
        .await
    }

    /// Puts a marker in the place of the one that was seen, if the process is still the one that was looked at.
    pub(crate) async fn swap(&self, swap: MarkerSwap) -> Result<Swapped, LinkError> {
        self.in_time(async { self.link.connect().await?.swap_marker(swap).await }).await
    }

    /// Several questions, each within a deadline of its own if the master is there at all.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        let late = |_| LinkError::broken("no answer in time");
        tokio::time::timeout(self.call_deadline * 6, work).await.map_err(late)?
    }

    /// Plays the eligibility through without the master.
    fn verdict(
        &self,
        facts: &Facts,
        mut marker: Option<String>,
        now: Moment,
        entropy: &dyn Entropy,
    ) -> Verdict {
        let quarantine = self.settings.quarantine(self.identity.cluster_config().max_ttl());
        let mut eligibility =
            Eligibility::new(self.identity.clone(), quarantine, self.settings.max_clock_skew)
                .returning_after(self.settings.returns_after());
        loop {
            match eligibility.look(facts, marker.as_deref(), now, None, entropy) {
                NextStep::Put { to, .. } => marker = Some(to),
                NextStep::Admit { .. } => return Verdict::Admitted,
                NextStep::Wait { until, diagnosis, .. } => {
                    return Verdict::Quarantined(until, diagnosis);
                }
                NextStep::Refuse(diagnosis) => return Verdict::Refused(diagnosis),
            }
        }
    }
}

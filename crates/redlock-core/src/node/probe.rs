//! One master for an operator's command: without a worker, over a new connection for each request.

use std::sync::Arc;
use std::time::Duration;

use super::eligibility::{Eligibility, Facts, Moment, NextStep, NodeIdentity, Peers};
use super::link::{Link, LinkError, MarkerSwap, ProbeReply, Swapped};
use super::{Diagnosis, Engine, NodeSettings};
use crate::model::clock::{Clock, Entropy};

/// A master and its identity in a configuration.
#[derive(Clone)]
pub struct Master {
    /// `host:port` or another name fit for logs. Names distinguish masters.
    pub name: String,
    /// The identity that its marker must have.
    pub identity: NodeIdentity,
    /// The settings that determine the length of a quarantine.
    pub settings: NodeSettings,
    /// The time limit of one request.
    pub call_deadline: Duration,
    /// The link to the master.
    pub link: Arc<dyn Link>,
}

/// What an operator's probe finds.
#[derive(Debug, Clone)]
pub struct Probe {
    /// The master's report about itself.
    pub facts: Facts,
    /// The marker that stands, if any.
    pub marker: Option<String>,
    /// A starting gateway's decision.
    pub verdict: Verdict,
    /// The master's clock minus ours, in microseconds.
    pub clock_offset_micros: i64,
    /// Which program would run the lock rules there; `None` if neither can be loaded.
    pub engine: Option<Engine>,
}

/// What a starting gateway would do with a master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The master votes at once.
    Admitted,
    /// The master votes after this time, counted from the gateway's start.
    Quarantined(Duration, Diagnosis),
    /// The master must not vote.
    Refused(Diagnosis),
}

impl Master {
    /// Probes the master without changing stored data.
    ///
    /// # Errors
    /// The link failed, or the master did not answer in time.
    pub async fn probe(
        &self,
        clock: &dyn Clock,
        entropy: &dyn Entropy,
    ) -> Result<Probe, LinkError> {
        let (ProbeReply { facts, marker, .. }, clock_offset_micros) =
            self.probe_with_offset(clock).await?;
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

    /// Probes the master. Also returns its clock minus ours, in microseconds.
    pub(crate) async fn probe_with_offset(
        &self,
        clock: &dyn Clock,
    ) -> Result<(ProbeReply, i64), LinkError> {
        self.in_time(async {
            let session = self.link.connect().await?;
            let reply = session.probe().await?;
            let before = clock.wall_micros() as i64;
            let node = session.time_micros().await?;
            Ok((reply, node - (before + clock.wall_micros() as i64) / 2))
        })
        .await
    }

    /// Replaces the probed marker, if the process is still the probed one.
    pub(crate) async fn swap(&self, swap: MarkerSwap) -> Result<Swapped, LinkError> {
        self.in_time(async { self.link.connect().await?.swap_marker(swap).await }).await
    }

    /// Runs several requests, within six times the limit of one.
    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        let late = |_| LinkError::broken("no answer in time");
        tokio::time::timeout(self.call_deadline * 6, work).await.map_err(late)?
    }

    /// Goes through the steps that a starting gateway would take, without changing the master. Each
    /// marker that the gateway would put is taken as put.
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
                .returning_after(self.settings.returns_after())
                .with_rules(self.settings.bound_rules());
        loop {
            match eligibility.next_step(
                facts,
                marker.as_deref(),
                now,
                Peers::default(),
                None,
                entropy,
            ) {
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

//! How far a run is, on stderr.

use std::time::Duration;

use crate::workload::Workload;

pub(super) struct Progress {
    /// With about how long each takes.
    plan: Vec<(Workload, Duration)>,
    at: usize,
}

impl Progress {
    pub(super) fn new(plan: Vec<(Workload, Duration)>) -> Self {
        Self { plan, at: 0 }
    }

    /// `done` is the share of the current workload that is over.
    pub(super) fn tell(&self, text: &str, done: f64) {
        let (number, all, workload) = (self.at + 1, self.plan.len(), self.plan[self.at].0);
        eprintln!("[{number}/{all} {workload}, {}]  {text}", left(self.left(done)));
    }

    pub(super) fn next(&mut self) {
        self.at += 1;
    }

    fn left(&self, done: f64) -> Duration {
        let current = self.plan[self.at].1.mul_f64(1.0 - done.clamp(0.0, 1.0));
        self.plan[self.at + 1..].iter().fold(current, |sum, (_, takes)| sum + *takes)
    }
}

fn left(time: Duration) -> String {
    match time.as_secs() {
        0..=59 => "less than 1 min left".into(),
        seconds => format!("about {} min left", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_is_not_left() {
        let seconds = Duration::from_secs;
        let mut progress = Progress::new(vec![(Workload::Mixed, seconds(60)), (Workload::Late, seconds(40))]);
        assert_eq!(progress.left(0.0), seconds(100));
        assert_eq!(progress.left(0.5), seconds(70));
        progress.next();
        assert_eq!(progress.left(0.25), seconds(30));
        assert_eq!(left(seconds(61)), "about 2 min left");
    }
}

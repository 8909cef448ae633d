//! A client of another Redlock library on the same masters. It sets its own value with SET NX PX on
//! one master after the other. It holds the lock if a majority took the value within the validity.
//! To release, it deletes the key where the value is still its own. It does not use watermarks or
//! markers, so it runs only in histories in which no master loses data.

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use crate::chance::{Chance, Stream};
use crate::faults::Stage;

/// How much of a TTL the client subtracts because its clock and the masters' may run at different
/// rates, as a fraction.
const DRIFT: f64 = 0.01;

/// The client's life until the history ends.
pub async fn live(stage: Stage, index: u8) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Foreign(index));
    loop {
        sleep(chance.gap(Duration::from_millis(700))).await;
        if Instant::now() >= stage.until {
            return;
        }
        let name = chance.below(u64::from(stage.plan.names)) as u8;
        let value = format!("foreign-{index}-{:016x}", chance.below(u64::MAX)).into_bytes();
        let ttl = Duration::from_millis(chance.pick(&[400, 1_000, 2_500]));
        let end = Instant::now() + ttl.mul_f64(1.0 - DRIFT) - Duration::from_millis(2);
        let mut votes = 0;
        for master in stage.masters.iter() {
            sleep(chance.millis(1, 4)).await;
            votes += usize::from(master.foreign_set(name, &value, ttl));
        }
        if votes > stage.masters.len() / 2 && Instant::now() < end {
            let from = stage.recorder.moment();
            stage.recorder.situation("locks of foreign clients");
            let release = Instant::now() + chance.millis(1, ttl.as_millis() as u64);
            sleep_until(release.min(end)).await;
            if Instant::now() <= end {
                stage.recorder.foreign(name, from);
            }
        }
        for master in stage.masters.iter() {
            sleep(chance.millis(1, 4)).await;
            master.foreign_delete(name, &value);
        }
    }
}

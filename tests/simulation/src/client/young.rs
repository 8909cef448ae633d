//! A client that leaves its locks alone, so they are young or old when masters restart, and are not
//! extended in between.

use std::collections::VecDeque;
use std::time::Duration;

use redlock_core::Ttl;
use tokio::time::Instant;

use super::{Client, How, Wish};
use crate::plan::YOUNG_NAMES;

impl Client {
    /// Takes a lock about once a second. About 4 s before the end of each lock it extends and then
    /// releases that lock.
    pub(super) async fn leave_alone(mut self) {
        let ttl = Ttl::from_duration(self.longest_ttl).expect("within the limits");
        let before_the_end = Duration::from_secs(4);
        let mut holds = VecDeque::new();
        for number in (0..YOUNG_NAMES).cycle() {
            let pause = self.chance.millis(600, 1_400);
            tokio::time::sleep(pause).await;
            if Instant::now() >= self.until {
                return;
            }
            while let Some(mut hold) = holds.pop_front_if(|hold: &mut super::Hold| {
                hold.until <= Instant::now() + before_the_end
            }) {
                let gateway = self.any_gateway();
                self.extend(gateway, &mut hold, ttl).await;
                self.release(gateway, &hold, 3).await;
            }
            let wish = Wish {
                other: None,
                slots: None,
                hold_at_least: Duration::ZERO,
                name: self.index * YOUNG_NAMES + number,
                ttl,
                owner: None,
                how: How::Polling,
                hangs_up: None,
            };
            let gateway = self.any_gateway();
            holds.extend(self.acquire(gateway, wish).await);
        }
    }
}

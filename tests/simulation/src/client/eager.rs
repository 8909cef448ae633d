//! Clients that want one of very few locks and nearly always wait in the queue. Most of them
//! release soon, through any gateway, so the queue moves. A few of them disconnect, forget the
//! lock, or sleep past their deadline.

use std::time::Duration;

use redlock_core::Ttl;
use tokio::time::Instant;

use super::{Client, Hold, Wish};

impl Client {
    pub(super) async fn queue_up(mut self) {
        while Instant::now() < self.until {
            let think = self.chance.gap(Duration::from_millis(40));
            tokio::time::sleep(think).await;
            let wish = self.wish(10);
            let gateway = self.home();
            if let Some(hold) = self.acquire_and_repeat(gateway, wish).await {
                self.use_briefly(hold, wish).await;
            }
        }
    }

    /// The TTL to ask for. Sometimes it is too short for the way to the masters.
    pub(super) fn asked_ttl(&mut self) -> Ttl {
        if self.hasty_percent > 0 && self.chance.percent(self.hasty_percent) {
            return Ttl::from_millis(self.chance.pick(&[10, 20, 40])).expect("within the limits");
        }
        self.ttl()
    }

    async fn use_briefly(&mut self, mut hold: Hold, wish: Wish) {
        let longest = self.chance.pick(&[3, 10, 40]);
        let pause = self.chance.millis(0, longest);
        tokio::time::sleep(pause).await;
        if Instant::now() < hold.until {
            self.write(&hold);
        }
        match self.chance.below(100) {
            0..10 => {
                let gateway = self.any_gateway();
                self.extend(gateway, &mut hold, wish.ttl).await;
            }
            10..15 => return self.end_hold(hold, wish).await,
            _ => {}
        }
        let gateway = if self.chance.percent(75) { self.home() } else { self.any_gateway() };
        self.release(gateway, &hold, 3).await;
    }
}

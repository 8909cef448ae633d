//! What is asked for, and what the gateway must be told for it.

use clap::Args;

use crate::options::{Shared, parsed};

/// Files that are open besides the waiters' connections, here or in the gateway.
pub(super) const OTHER_FILES: u64 = 200;

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench -- waiters
  redlock-bench waiters --waiters 2000 --names 1 --gateway-arg=--max-waiters-per-lock=2000 --json waiters.json

Ten thousand waiters need as many open files here and in the gateway: the soft limit is raised as far as the hard one
allows, and it says so when that is not enough.
It exits with 1 when a waiter is not answered as it must be, and when anything is left behind.";

/// Measures very many requests that wait at the same time.
///
/// Starts five redis-servers and one gateway, lets all waiters wait three times, with holders that let go, with half of
/// the waiters hanging up, and with holders that stay, and prints what it saw. Progress goes to stderr, the table to
/// stdout.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Requests that wait at the same time, each on a connection of its own
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub(super) waiters: u32,

    /// Locks they wait for, equally many at each
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) names: u32,

    /// How long they ask to wait
    #[arg(long, value_name = "MS", default_value_t = 25_000, value_parser = clap::value_parser!(u64).range(1..=300_000))]
    pub(super) wait_ms: u64,

    /// How long they ask to wait for locks that nobody lets go
    #[arg(long, value_name = "MS", default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=300_000))]
    pub(super) short_wait_ms: u64,

    /// The time over which they send their requests
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    pub(super) ramp_ms: u64,

    /// How long an unrelated name is acquired and released every 10 ms, while all are idle and while all wait
    #[arg(long, value_name = "S", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub(super) probe_seconds: u64,

    #[command(flatten)]
    pub(crate) shared: Shared,
}

impl Options {
    /// As part of the suite; a quick one is smaller.
    pub(crate) fn of_suite(quick: bool, gateway_arg: &[String]) -> Self {
        let mut options = parsed::<Self>(&[]);
        if quick {
            (options.waiters, options.names) = (2000, 200);
            (options.ramp_ms, options.probe_seconds, options.short_wait_ms) = (500, 1, 1000);
        }
        options.shared.gateway_arg = gateway_arg.to_vec();
        options
    }

    /// Limits that would otherwise refuse some of the waiters; one that the user gives wins.
    pub(super) fn gateway_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut limit = |flag: &str, value: u32| {
            if !self.shared.gateway_arg.iter().any(|given| given.split('=').next() == Some(flag)) {
                args.push(format!("{flag}={value}"));
            }
        };
        limit("--max-connections", self.waiters + OTHER_FILES as u32);
        limit("--max-waiters", self.waiters);
        // All come from one address.
        limit("--max-waiters-per-client", self.waiters);
        if self.names > 1024 {
            limit("--max-waited-locks-per-client", self.names);
        }
        let each = self.waiters.div_ceil(self.names);
        if each > 1024 {
            limit("--max-waiters-per-lock", each);
        }
        args.extend(self.shared.gateway_arg.iter().cloned());
        args
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if self.names > self.waiters {
            return Err(format!("--names {} exceeds --waiters {}", self.names, self.waiters));
        }
        let needed = self.ramp_ms + self.probe_seconds * 1000 + 5000;
        if self.wait_ms < needed {
            return Err(format!("--wait-ms {} is too short: ramp, probe and service need {needed}", self.wait_ms));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_fit_the_waiters_and_the_users_own_win() {
        let args = parsed::<Options>(&["--waiters=5000", "--names=2", "--gateway-arg=--max-waiters=7"]).gateway_args();
        assert_eq!(
            args,
            [
                "--max-connections=5200",
                "--max-waiters-per-client=5000",
                "--max-waiters-per-lock=2500",
                "--max-waiters=7"
            ]
        );
    }

    #[test]
    fn waits_that_end_before_they_are_served_are_refused() {
        assert!(parsed::<Options>(&[]).check().is_ok());
        assert!(parsed::<Options>(&["--wait-ms=9000"]).check().is_err());
        assert!(parsed::<Options>(&["--names=20000"]).check().is_err());
    }
}

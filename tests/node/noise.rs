//! A master that answers with random bytes, before and after the login. `NOISE_SEED=<seed>` repeats
//! a run.

use redlock_core::node::NodeState;

use crate::support::chance::{Chance, seed};
use crate::support::harness::{RedisServer, eventually};
use crate::support::nodes::{hasty_node, in_state};
use crate::support::turncoat::{FaultyMaster, Nonsense};

const ROUNDS: usize = 30;
const WORDS: [&str; 18] = [
    "+",
    "-",
    ":",
    "$",
    "*",
    "~",
    "%",
    ">",
    "_",
    "#t",
    "=",
    "!",
    "|",
    "?",
    "-1",
    "*1\r\n",
    "+OK\r\n",
    "$5\r\nhello\r\n",
];

/// A mixture of pieces of replies, numbers and random bytes.
fn noise(chance: &mut Chance) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..=chance.below(200) {
        match chance.below(4) {
            0 => bytes.extend_from_slice(chance.next().to_string().as_bytes()),
            1 => bytes.extend_from_slice(b"\r\n"),
            2 => bytes.push(chance.next() as u8),
            _ => bytes.extend_from_slice(WORDS[chance.below(WORDS.len())].as_bytes()),
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_survives_any_answer_of_its_master() {
    let server = RedisServer::start();
    let faulty = FaultyMaster::before(&server);
    // Part of an answer leaves the node waiting for the rest.
    let node = hasty_node(&faulty.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let mut chance = Chance::of(seed("NOISE_SEED"), 0);
    for round in 0..ROUNDS {
        let earlier = faulty.nonsense_count();
        let noise = noise(&mut chance);
        faulty.start_nonsense(if chance.one_in(4) {
            Nonsense::endless(noise.clone(), noise)
        } else {
            Nonsense::once(noise)
        });
        eventually("the node got noise", async || {
            (faulty.nonsense_count() > earlier).then_some(())
        })
        .await;
        // After every tenth round the noise ends, and the node must vote again.
        if round % 10 == 9 {
            faulty.stop_nonsense();
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
    }
}

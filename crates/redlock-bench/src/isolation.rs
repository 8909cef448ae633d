//! Whether one client can take the service away from the others: a victim, and attackers of small rights beside it.
//!
//! The victim acquires, extends and releases at a fixed modest rate. Its turns alternate: calm, and beside an attack. What
//! an attack leaves behind (full masters, a line of waiters) must not spoil the calm turns, so they are at a service of
//! their own, which has nothing to do meanwhile. Attacked services are started anew for each attack, and keep what it left
//! behind from round to round.
//!
//! All share one machine. The attacker's process is therefore niced, or else its own CPU time would be what is measured;
//! two controls say how much of the machine is left in that case.
//!
//! | module | holds |
//! | --- | --- |
//! | `attacks` | the table of attacks |
//! | `attacker` | the process that attacks |
//! | `victim` | who suffers, and what it sees |
//! | `service` | masters, a gateway and its keys |
//! | `requests` | requests with a key |
//! | `report` | figures and goals |

mod attacker;
mod attacks;
mod report;
mod requests;
mod service;
mod victim;

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::sleep;

use self::attacker::Tally;
pub(crate) use self::attacker::{Options as AttackerOptions, attack};
use self::attacks::Attack;
use self::report::{Got, Report, Row, Turn};
use self::service::{Mode, Service};
use self::victim::{PATIENCE, Seen, Victim, Window};
use crate::contenders::find_gateway;
use crate::options::Shared;
use crate::report::{JsonFile, Machine, Source};
use crate::servers::{Process, Scratch};

/// Long enough for the victim to have its locks.
const WARM_UP: Duration = Duration::from_millis(700);
/// For an attacker to have all its connections; after it, the attack is measured as it is.
const READY_WITHIN: Duration = Duration::from_secs(12);
const LOOK_EVERY: Duration = Duration::from_millis(50);
const VICTIM_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ATTACKER_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
/// Files that are open besides the attacker's connections.
const OTHER_FILES: u64 = 100;

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench -- isolation
  redlock-bench isolation --quick --mode keys --only list,bodies
  redlock-bench isolation --nice 0 --attacker-rate 1000 --only acquire,held,get --json isolation.json

A goal that is missed is a figure, and no failure. It exits with 1 when the victim fails without an attacker.";

/// Measures what a client notices of another one that attacks the service.
///
/// For each attack it starts five redis-servers and one gateway, lets a victim work there beside the attack and, in turn,
/// at a service that is not attacked, and prints what the victim got, its latencies and their ratio. Progress goes to
/// stderr, the table to stdout.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Run only these attacks, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    only: Vec<Attack>,

    /// With keys, or without any: clients are then told apart by address [default: both, or keys with --quick]
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    mode: Vec<Mode>,

    /// Length of one turn [default: 4, or 2 with --quick]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: Option<u64>,

    /// Turns with each attack, and as many without [default: 3, or 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,

    /// Short turns, and one round only
    #[arg(long)]
    quick: bool,

    /// Niceness of the attacker's process, which shares this machine
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(i32).range(0..=19))]
    nice: i32,

    /// The most that all connections of the attacker try in a second [default: as often as they are answered]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    attacker_rate: u32,

    /// The attacker comes from the victim's address, as behind one proxy: only keys tell them apart
    #[arg(long)]
    one_address: bool,

    #[command(flatten)]
    shared: Shared,
}

impl Options {
    fn seconds(&self) -> u64 {
        self.seconds.unwrap_or(if self.quick { 2 } else { 4 })
    }

    fn attacks(&self) -> Vec<Attack> {
        let wanted = |attack: &Attack| self.only.is_empty() || self.only.contains(attack);
        Attack::value_variants().iter().copied().filter(wanted).collect()
    }

    fn modes(&self) -> Vec<Mode> {
        match self.mode.as_slice() {
            [] if self.quick => vec![Mode::Keys],
            [] => Mode::value_variants().to_vec(),
            given => given.to_vec(),
        }
    }
}

/// Must be called on the main thread, because it starts processes.
pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let gateway = find_gateway(options.shared.gateway.as_deref())?;
    let bench = std::env::current_exe().map_err(|error| format!("cannot find this program's own file: {error}"))?;
    let json = JsonFile::create(options.shared.json.as_deref())?;
    let run = Run { options, gateway, bench, scratch: Scratch::create()?, most_connections: allow_open_files()? };
    let mut report = Report {
        machine: Machine::look()?,
        source: Source::look(),
        seconds: options.seconds(),
        rounds: options.rounds.unwrap_or(if options.quick { 1 } else { 3 }),
        nice: options.nice,
        rate: options.attacker_rate,
        one_address: options.one_address,
        rows: Vec::new(),
        failures: Vec::new(),
    };
    for mode in options.modes() {
        for attack in options.attacks() {
            eprintln!("{} {}", attack.name(), if mode == Mode::Keys { "with keys" } else { "without keys" });
            match run.row(mode, attack, report.rounds).await {
                Ok(row) => report.rows.push(row),
                Err(error) => report.failures.push(format!("{}: {error}", attack.name())),
            }
        }
    }
    print!("{report}");
    json.write(&report)?;
    report.verdict()
}

struct Run<'a> {
    options: &'a Options,
    gateway: PathBuf,
    bench: PathBuf,
    /// For what the attackers print.
    scratch: Scratch,
    most_connections: u32,
}

impl Run<'_> {
    async fn row(&self, mode: Mode, attack: Attack, rounds: u32) -> Result<Row, String> {
        let needs = attack.needs();
        let start =
            async |program: &Path| Service::start(program, &needs, mode, &self.options.shared.gateway_arg).await;
        let (calm, attacked) = (start(&self.gateway).await?, start(&self.gateway).await?);
        let mut row = Row { mode, attack, calm: Vec::new(), attacked: Vec::new() };
        for round in 0..rounds {
            // Neither of the two always comes first: what the machine does between them must not favour one.
            for is_calm in if round % 2 == 0 { [true, false] } else { [false, true] } {
                if is_calm {
                    row.calm.push(self.turn(mode, attack, &calm, None, round).await?);
                } else {
                    let target = if attack.is_elsewhere() { &calm } else { &attacked };
                    row.attacked.push(self.turn(mode, attack, &attacked, Some(target), round).await?);
                }
            }
        }
        Ok(row)
    }

    /// The victim's turn at a service, beside an attack on a target.
    async fn turn(
        &self,
        mode: Mode,
        attack: Attack,
        service: &Service,
        target: Option<&Service>,
        round: u32,
    ) -> Result<Turn, String> {
        let length = Duration::from_secs(self.options.seconds());
        let window = Window::new(length);
        let victim = Victim {
            gateway: service.gateway.address,
            source: VICTIM_ADDRESS,
            key: mode.victim(),
            is_at_lines: attack.is_at_lines(),
            window: window.clone(),
        };
        let mut victim = victim.start()?;
        victim.run_for(WARM_UP).await?;
        let attacker = match target {
            Some(target) => Some(self.start_attacker(mode, attack, target)?),
            None => None,
        };
        if let Some(attacker) = &attacker {
            let began = Instant::now();
            while !tally(attacker).is_ready && began.elapsed() < READY_WITHIN {
                victim.run_for(LOOK_EVERY).await?;
            }
            let prelude = if round == 0 { attack.needs().prelude } else { Duration::ZERO };
            victim.run_for(prelude + WARM_UP).await?;
        }

        let look = || Look::at(service, attacker.as_ref());
        let (before, began) = (look()?, Instant::now());
        window.begin();
        sleep(length).await;
        let (after, elapsed) = (look()?, began.elapsed().as_secs_f64());
        // Those that were due at the end may still be answered beside the attack.
        let seen = Seen::sum(victim.finish(PATIENCE * 4).await?);
        let attacker = attacker.map(|process| {
            drop(process);
            let got = after.tally.since(&before.tally);
            let per_second = got.into_iter().map(|(what, count)| (what, count as f64 / elapsed)).collect();
            Got { is_ready: after.tally.is_ready, holding: after.tally.holding, per_second }
        });
        let cores = [0, 1, 2].map(|at| after.cpu[at].saturating_sub(before.cpu[at]).as_secs_f64() / elapsed);
        let peak = service.gateway.process.peak_memory_bytes()? as f64 / f64::from(1 << 20);
        let turn = Turn::new(&seen, cores, peak, attacker);
        eprintln!("  round {} {turn}", round + 1);
        // For the gateway to see that connections are gone.
        sleep(WARM_UP).await;
        Ok(turn)
    }

    fn start_attacker(&self, mode: Mode, attack: Attack, target: &Service) -> Result<Process, String> {
        let connections = attack.needs().connections.min(self.most_connections);
        let source = if self.options.one_address { VICTIM_ADDRESS } else { ATTACKER_ADDRESS };
        let args = [
            format!("--adjustment={}", self.options.nice),
            self.bench.display().to_string(),
            "attack".into(),
            attack.name(),
            format!("--target={}", target.gateway.address),
            format!("--source={source}"),
            format!("--connections={connections}"),
            format!("--key={}", mode.attacker()),
            format!("--rate={}", self.options.attacker_rate),
        ];
        let scratch = &self.scratch;
        let name = format!("attacker-{}-{:08x}", attack.name(), rand::random::<u32>());
        Process::spawn(&name, Path::new("nice"), &args, scratch)
    }
}

fn tally(attacker: &Process) -> Tally {
    Tally::last_of(&attacker.output()).unwrap_or_default()
}

/// What everybody has used and got so far.
struct Look {
    cpu: [Duration; 3],
    tally: Tally,
}

impl Look {
    fn at(service: &Service, attacker: Option<&Process>) -> Result<Self, String> {
        let spent = attacker.map_or(Ok(Duration::ZERO), Process::cpu)?;
        let cpu = [service.gateway.process.cpu()?, service.masters.cpu()?.masters, spent];
        Ok(Self { cpu, tally: attacker.map(tally).unwrap_or_default() })
    }
}

/// As many as the system lets this process have, and its children; says how many connections an attacker may open.
fn allow_open_files() -> Result<u32, String> {
    let limit = getrlimit(Resource::Nofile);
    let Rlimit { maximum, .. } = limit;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| format!("cannot raise the limit of open files: {error}"))?;
    let most = maximum.unwrap_or(u64::MAX).saturating_sub(OTHER_FILES);
    Ok(u32::try_from(most).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parsed;

    #[test]
    fn attacks_run_in_their_usual_order_in_both_modes_unless_told_otherwise() {
        let all = parsed::<Options>(&[]);
        assert_eq!((all.attacks().len(), all.modes()), (17, vec![Mode::Keys, Mode::Anonymous]));
        let some = parsed::<Options>(&["--only=get,list", "--quick"]);
        assert_eq!(some.attacks(), [Attack::List, Attack::Get]);
        assert_eq!((some.modes(), some.seconds()), (vec![Mode::Keys], 2));
    }
}

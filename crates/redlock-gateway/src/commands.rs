//! The operator's commands: `check` and `reconfigure`, which talk to nodes, and `key new`.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::join_all;
use redlock_core::Ttl;
use redlock_core::clock::{OsEntropy, SystemClock};
use redlock_core::node::Remedy;
use redlock_core::node::eligibility::ClusterConfig;
use redlock_core::node::probe::{Master, Probe, Verdict};
use redlock_core::node::redis::{RedisNode, RedisUrl, RedisUrlError};
use redlock_core::quorum::Quorum;
use redlock_core::reconfigure::{Left, Old, OldNodes, Progress, ReconfigureError, survey};

use crate::audit::AuditFile;
use crate::auth::{Keys, KeysTextError, Secret, Verb, exposed_mode};
use crate::config::{Config, NodePassword, Nodes, show};
use crate::output;
use crate::overload::shares;
use crate::remedy::{in_flags, in_words};
use crate::serve::{
    ServeError, check_addresses, cluster_name, named_cluster, redis_settings, within_descriptors,
};

/// Why a command did not do what it was asked for. Each text contains the text of its source.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("--node: none given; embedded nodes have no markers")]
    NoMarkers,
    #[error("--old-node: {0}")]
    OldNode(#[from] RedisUrlError),
    #[error(
        "--cluster: {0:?} stands for the old list of nodes, and markers could not tell the two \
         apart; give the new list another name, and --old-cluster {0:?}"
    )]
    SameName(String),
    #[error("{}", reconfigure_error(source, old_given))]
    Reconfigure {
        source: ReconfigureError,
        /// The old node set, as far as flags name it.
        old_given: String,
    },
    #[error(
        "--expires {0:?} is not a date; expected one such as 2027-01-31 (its beginning, UTC), or \
         2027-01-31T12:00:00Z"
    )]
    Expires(String),
    #[error(transparent)]
    Key(#[from] KeysTextError),
    #[error("--out: {}: it exists, and a key is not overwritten; name a new file", .0.display())]
    KeyFileExists(PathBuf),
    #[error("--out: {}: {source}", path.display())]
    KeyFile { path: PathBuf, source: std::io::Error },
}

/// Prints a report on every node. Returns whether a gateway would start with an admitted majority.
pub async fn check(config: &Config) -> bool {
    println!("configuration: valid");
    print_capacity(config);
    let starts = starts(config);
    if let Err(error) = &starts {
        println!("WOULD NOT START: {error}");
    }
    check_nodes(config).await && starts.is_ok()
}

/// Checks what only a start would find out.
fn starts(config: &Config) -> Result<(), ServeError> {
    within_descriptors(config.clone())?;
    config.settings.audit_log.as_deref().map_or(Ok(()), AuditFile::check)?;
    check_addresses(config, |error| println!("{error}; perhaps a gateway serves there already"))?;
    Ok(())
}

async fn check_nodes(config: &Config) -> bool {
    let Nodes::Redis(urls) = &config.nodes else {
        println!(
            "nodes: embedded in the process; nothing to check, and nothing survives a restart of the gateway"
        );
        return true;
    };
    let mut admitted = 0;
    let mut later = 0;
    let mut new = 0;
    let mut seen: Vec<(String, &RedisUrl)> = Vec::new();
    let masters = masters(config, urls);
    let probes = masters.iter().map(|master| master.probe(&SystemClock, &OsEntropy));
    let probes = join_all(probes).await;
    let clock_agrees = |found: &Probe| {
        found.clock_offset_micros.unsigned_abs() <= config.settings.clock_skew.as_micros() as u64
    };
    let waits =
        |found: &Probe| matches!(found.verdict, Verdict::Quarantined(..)) && clock_agrees(found);
    let is_new = |found: &Probe| waits(found) && found.marker.is_none();
    let skips_wait =
        config.settings.bootstrap && probes.iter().all(|probe| probe.as_ref().is_ok_and(is_new));
    for ((url, master), probe) in urls.iter().zip(masters).zip(probes) {
        match probe {
            Ok(found) => {
                if let Some((_, other)) =
                    seen.iter().find(|(run_id, _)| *run_id == found.facts.run_id)
                {
                    println!(
                        "{url}: REFUSED: it is the same Redis process as {other}; a quorum needs independent masters"
                    );
                    continue;
                }
                seen.push((found.facts.run_id.clone(), url));
                let is_admitted = found.verdict == Verdict::Admitted && clock_agrees(&found);
                admitted += usize::from(is_admitted);
                later += usize::from(waits(&found));
                new += usize::from(is_new(&found));
                print_probe(&master, &found, config.settings.clock_skew, skips_wait);
            }
            Err(why) => {
                // A server without TLS takes the handshake for the beginning of a command and waits
                // for the rest. So no answer to a TLS connection may mean that the server has no
                // TLS.
                let is_silent = url.is_tls() && why.detail == "no answer in time";
                let remedy = why.remedy.or(is_silent.then_some(Remedy::MatchTls));
                let remedy =
                    remedy.map(|remedy| format!("; {}", in_flags(remedy))).unwrap_or_default();
                println!("{url}: UNREACHABLE: {why}{remedy}");
            }
        }
    }
    if config.settings.bootstrap && new == urls.len() {
        println!(
            "--bootstrap: all nodes are new: they are admitted at once, unless a gateway without it sees them first"
        );
        (admitted, later) = (new, 0);
    } else if config.settings.bootstrap {
        println!(
            "--bootstrap: WOULD NOT COUNT: {new} of {} nodes are new, and all must be; leave the flag out: nodes in \
             quarantine vote when it ends; start nodes that are missing, with their data",
            urls.len()
        );
    } else if new == urls.len() {
        println!(
            "no node has a marker: if this cluster was never used, start its first gateway with --bootstrap, and it votes \
             at once; if it lost its data, leave the flag out and wait"
        );
    }
    let needed = Quorum::new(urls.len()).map_or(0, Quorum::size);
    let enough = admitted >= needed;
    let verdict = if enough { "ok" } else { "NOT ENOUGH" };
    let waiting = if later == 0 { String::new() } else { format!(", {later} after a quarantine") };
    println!(
        "{verdict}: {admitted} of {} nodes would be admitted now{waiting}, {needed} needed",
        urls.len()
    );
    enough
}

/// Prints the limits, how much memory they may take, and how many connections the file descriptors
/// allow.
fn print_capacity(config: &Config) {
    let (costs, sum) = config.capacity.costs();
    let costs = costs.map(|(flag, count, cost)| format!("{flag} {count}: {cost}")).into_iter();
    let pools = config.capacity.pools().into_iter().filter(|(_, bytes)| bytes.as_u64() > 0);
    let pools = pools.map(|(what, bytes)| format!("{what}: {bytes}"));
    let parts: Vec<_> = costs.chain(pools).collect();
    println!("memory: at most {sum} of {} ({})", config.capacity.budget(), parts.join(", "));
    if let Some(excess) = config.capacity.excess() {
        println!("  WARNING: {excess}");
    }
    match within_descriptors(config.clone()) {
        Ok(within) if within.capacity.connections < config.capacity.connections => println!(
            "  WARNING: ulimit -n of this shell allows only {} connections",
            within.capacity.connections
        ),
        // `check` prints this error as `WOULD NOT START`.
        Ok(_) | Err(_) => {}
    }
    println!("limits:");
    for [what, all, one] in shares::table(&config.capacity, config.wait_share()) {
        println!("  {what:<36} {all:>12}   {one}");
    }
}

/// `skips_wait`: whether `--bootstrap` applies.
fn print_probe(master: &Master, found: &Probe, skew: Duration, skips_wait: bool) {
    let facts = &found.facts;
    let ours = master.identity.cluster_config();
    let is_ours =
        |marker: &str| ours.bounds_in(marker).is_some_and(|bounds| bounds.limit >= ours.max_ttl());
    let marker = match &found.marker {
        None => "marker absent".to_owned(),
        Some(marker) if is_ours(marker) => "marker ours".to_owned(),
        Some(_) => "marker FOREIGN".to_owned(),
    };
    let offset = found.clock_offset_micros as f64 / 1000.0;
    let far = Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew / 2;
    let warning =
        if far { format!(" (TOO FAR: more than half of {})", show(skew)) } else { String::new() };
    println!(
        "{}: {}, role {}, policy {}, {}, {marker}, clock {offset:+.1} ms{warning}, evicted {}, rules {}",
        master.name,
        facts.server,
        facts.role,
        if facts.policy.is_empty() { "unknown" } else { &facts.policy },
        facts.durability,
        facts.evicted_keys,
        found.engine.map_or("cannot be loaded", |engine| engine.as_str()),
    );
    match &found.verdict {
        Verdict::Refused(diagnosis) => println!("  REFUSED: {}", in_words(diagnosis)),
        Verdict::Admitted | Verdict::Quarantined(..)
            if Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew =>
        {
            println!(
                "  WOULD REFUSE every vote: its clock is more than {} from this machine's",
                show(skew)
            );
        }
        Verdict::Admitted => println!("  would be admitted at once"),
        Verdict::Quarantined(..) if skips_wait => {
            println!("  new: --bootstrap lets it vote at once")
        }
        Verdict::Quarantined(wait, diagnosis) => {
            let wait = show(*wait);
            let why = in_words(diagnosis);
            println!(
                "  WOULD WAIT {wait}, counted from when a gateway first sees this node in this state, or only seconds if enough other nodes are admitted: {why}"
            );
        }
    }
}

/// Prints a line of a reconfiguration. If nobody reads the line, the reconfiguration must neither
/// block nor end, because the nodes give no votes until it is done.
macro_rules! say {
    ($($word:tt)*) => { output::print(format!($($word)*) + "\n") };
}

/// Gives all nodes the markers of this configuration, by [`redlock_core::reconfigure`]. Without
/// `really`, only prints what would be done.
///
/// # Errors
/// The flag that is missing or wrong, or the node that could not be changed.
pub async fn reconfigure(
    config: &Config,
    old: &OldCluster,
    really: bool,
) -> Result<(), CommandError> {
    let Nodes::Redis(urls) = &config.nodes else {
        return Err(CommandError::NoMarkers);
    };
    let old_urls = old.urls(&config.node_password)?;
    old.check_name(config, urls, &old_urls)?;
    let old_cluster = match &old.name {
        Some(name) => named_cluster(name, old_urls.len()),
        None => ClusterConfig::cluster_of_nodes(old_urls.iter().map(RedisUrl::name)),
    };
    let max_ttl = old.max_ttl.map(|ttl| ttl.duration());
    let old_nodes = match (old.is_none, old_urls.is_empty()) {
        (true, _) => Old::Nobody,
        (false, true) => Old::Unsaid,
        (false, false) => Old::Nodes(OldNodes {
            cluster: old_cluster.clone(),
            masters: masters(config, &old_urls),
            max_ttl,
        }),
    };
    let names = |urls: &[RedisUrl]| urls.iter().map(RedisUrl::name).collect::<Vec<_>>().join(",");
    match (names(&old_urls), names(urls)) {
        (old, new) if !old.is_empty() && old != new => say!("nodes: {old} → {new}"),
        (_, new) => say!("nodes: {new}"),
    }
    let failed = |source| {
        let old_given = if old_urls.is_empty() { "none" } else { &old_cluster };
        CommandError::Reconfigure { source, old_given: old_given.to_owned() }
    };
    let left = Left { nodes: old_nodes, max_clock_skew: old.clock_skew };
    let change = survey(masters(config, urls), left, print_progress).await.map_err(failed)?;
    let max_ttl = show(config.settings.limits.max_ttl.duration());
    if !really && change.is_raise() {
        say!(
            "nothing was changed; with --yes: the markers of these nodes permit a max_ttl of {max_ttl} within seconds; all \
             nodes keep voting, and no request fails"
        );
        return Ok(());
    }
    if !really {
        let wait = show(change.wait());
        say!(
            "nothing was changed; with --yes: these nodes give no votes for {wait}, so nobody gets or extends a lock in that time; \
             then the new markers count"
        );
        return Ok(());
    }
    change.carry_out(&OsEntropy, print_progress).await.map_err(failed)?;
    if change.is_raise() {
        say!(
            "done: the markers of {} nodes permit a max_ttl of {max_ttl}; all nodes voted on\n\
             next: restart the gateways with --max-ttl {max_ttl}, one after the other; until then each refuses a TTL above \
             its own --max-ttl",
            urls.len()
        );
        return Ok(());
    }
    say!("done: {} nodes carry the new marker", urls.len());
    Ok(())
}

fn print_progress(progress: Progress<'_>) {
    match progress {
        Progress::Stays { master, marker: None, .. } => {
            say!("{master}: joins; it has no marker yet")
        }
        Progress::Stays { master, marker: Some(marker), new_prefix } => {
            let changes = [
                (
                    "max_ttl",
                    ClusterConfig::max_ttl_of(marker),
                    ClusterConfig::max_ttl_of(new_prefix),
                ),
                (
                    "clock_skew",
                    ClusterConfig::clock_skew_of(marker),
                    ClusterConfig::clock_skew_of(new_prefix),
                ),
            ];
            let changed = |(what, old, new): (&str, Option<Duration>, Option<Duration>)| {
                let old = old?;
                let new = new?;
                (old != new).then(|| format!("{what} {} → {}", show(old), show(new)))
            };
            let changes: Vec<_> = changes.into_iter().filter_map(changed).collect();
            let colon = if changes.is_empty() { "" } else { "; " };
            say!("{master}: stays{colon}{}", changes.join(", "));
        }
        Progress::Leaves { master, .. } => say!("{master}: leaves"),
        Progress::Lost { master, error } => {
            say!("{master}: {error}; leaves without having answered")
        }
        Progress::NotYetRaised { master, why } => say!("{master}: {why}; trying again"),
        Progress::VotesStopped(wait) => say!(
            "these nodes give no votes now; waiting {} until no lock of the old configuration can live\n\
             start no gateway of the new configuration before this wait ends, and stop every gateway of the old one: a running one\n\
             admits a leaving node again when that node loses its data",
            show(wait)
        ),
    }
}

fn reconfigure_error(error: &ReconfigureError, old_given: &str) -> String {
    match error {
        ReconfigureError::Unfit(master, diagnosis) => format!("{master}: {}", in_words(diagnosis)),
        ReconfigureError::OtherSet(left) => format!(
            "--old-node: the markers are of node set {left}, and the nodes given ({old_given}) are not that set; name every \
             node that the gateways used until now (and --old-cluster, if they used a name), so that leaving nodes stop \
             voting too"
        ),
        error @ ReconfigureError::TooFewStopped { .. } => format!("--old-node: {error}"),
        ReconfigureError::OldUnknown => {
            "--old-node: not all of these nodes have a marker that names the nodes of the gateways until now; name each of \
             those, or give --no-old-nodes"
                .into()
        }
        ReconfigureError::MaxTtlUnknown => {
            "--old-max-ttl: no marker is left that states how long a lock of the old nodes may live; give the --max-ttl that \
             the gateways used until now"
                .into()
        }
        ReconfigureError::ClockSkewUnknown => {
            "--old-clock-skew: not all markers state it (those of older versions do not); give the --clock-skew that the \
             gateways used until now, the longest where they differed"
                .into()
        }
        error @ (ReconfigureError::Unreachable(..)
        | ReconfigureError::OtherChange(..)
        | ReconfigureError::Overtaken(..)
        | ReconfigureError::SameProcess(..)
        | ReconfigureError::SeveralSets(..)
        | ReconfigureError::NotRaised(..)
        | ReconfigureError::Interrupted(..)) => error.to_string(),
    }
}

/// The old configuration, as the operator's flags give it. A value may be absent if the markers on
/// the nodes state it.
pub struct OldCluster {
    pub nodes: Vec<String>,
    pub name: Option<String>,
    pub max_ttl: Option<Ttl>,
    pub clock_skew: Option<Duration>,
    /// Whether the operator confirms that there was no old configuration.
    pub is_none: bool,
}

impl OldCluster {
    fn urls(&self, password: &NodePassword) -> Result<Vec<RedisUrl>, RedisUrlError> {
        let parse = |text: &String| RedisUrl::parse(text).map(|url| password.give(url));
        self.nodes.iter().map(parse).collect()
    }

    /// Refuses a changed list under an unchanged name: markers could not tell the two lists apart.
    fn check_name(
        &self,
        config: &Config,
        urls: &[RedisUrl],
        old: &[RedisUrl],
    ) -> Result<(), CommandError> {
        let Some(name) = &config.settings.cluster else { return Ok(()) };
        let same_name = self.name.as_ref().is_none_or(|old| old == name);
        let other_list = old.len() != urls.len()
            || old.iter().any(|old| urls.iter().all(|url| url.name() != old.name()));
        if same_name && !old.is_empty() && other_list {
            return Err(CommandError::SameName(name.clone()));
        }
        Ok(())
    }
}

/// Makes a master for each URL, with the settings that belong to its position in the list.
fn masters(config: &Config, urls: &[RedisUrl]) -> Vec<Master> {
    let names: Vec<String> = urls.iter().map(|url| url.name().to_owned()).collect();
    let cluster = cluster_name(config, &names);
    let settings = redis_settings(config, &cluster, urls.len());
    let master = |(place, url): (usize, &RedisUrl)| RedisNode::master(url.clone(), settings(place));
    urls.iter().enumerate().map(master).collect()
}

/// A new key, and its TOML entry for the keys file.
pub struct NewKey {
    key: String,
    entry: String,
}

impl NewKey {
    /// The key, an empty line, and the entry.
    pub fn text(&self) -> String {
        format!("{}\n\n{}", self.key, self.entry)
    }

    /// Writes the key to a new file that only its owner can read. Returns the entry.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub fn write(self, path: &Path) -> Result<String, CommandError> {
        let failed = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AlreadyExists => CommandError::KeyFileExists(path.to_owned()),
            _ => CommandError::KeyFile { path: path.to_owned(), source },
        };
        let mut file =
            File::options().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        writeln!(file, "{}", self.key).and_then(|()| file.sync_all()).map_err(failed)?;
        Ok(self.entry)
    }
}

/// Makes a key.
///
/// # Errors
/// The argument that the keys file would not accept.
pub fn new_key(
    name: &str,
    verbs: &[Verb],
    names: &[String],
    expires: Option<&str>,
) -> Result<NewKey, CommandError> {
    let secret = Secret::new(name, &OsEntropy);
    let quoted = |texts: Vec<&str>| {
        texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ")
    };
    let verbs = quoted(verbs.iter().map(|verb| verb.word()).collect());
    let names = quoted(names.iter().map(String::as_str).collect());
    let mut entry = format!(
        "[[key]]\nname = {name:?}\nhashes = [{:?}]\nallow = [{{ verbs = [{verbs}], names = [{names}] }}]\n",
        secret.hash_text()
    );
    if let Some(expires) = expires {
        let is_date = expires.parse::<toml::value::Datetime>().is_ok();
        if !is_date {
            return Err(CommandError::Expires(expires.to_owned()));
        }
        entry.push_str(&format!("expires = {expires}\n"));
    }
    Keys::parse(&entry)?;
    Ok(NewKey { key: secret.expose().to_string(), entry })
}

/// Returns a warning for each risk: other users can read the key in `output`, or can read or write
/// the keys file.
pub fn exposures(keys: Option<&Path>, output: Option<&impl AsFd>) -> Vec<String> {
    let output = output.and_then(|output| {
        let fd = output.as_fd().try_clone_to_owned().ok()?;
        File::from(fd).metadata().ok()
    });
    let output = output.as_ref().and_then(|file| exposed_mode(file, 0o077)).map(|mode| {
        format!("the key was written to a file with mode {mode:04o}: others can read it; make another key, with --out FILE")
    });
    let keys = keys.and_then(Keys::exposure).map(|exposure| format!("--auth-keys: {exposure}"));
    keys.into_iter().chain(output).collect()
}

//! The operator's commands that do not serve: `check` and `reconfigure`, which talk to nodes, and `key new`.

use std::time::Duration;

use redlock_core::clock::{OsEntropy, SystemClock};
use redlock_core::node::admission::{ClusterConfig, quarantine};
use redlock_core::node::redis::{NewMarker, Probe, RedisSettings, RedisUrl, Verdict, overwrite_marker};
use redlock_core::quorum::Quorum;

use crate::auth::{Keys, Secret, Verb};
use crate::config::{Config, Nodes, show};
use crate::remedy::in_words;
use crate::serve::{cluster_name, named_cluster, redis_settings};

/// Reports every node on standard output; true when a majority would be admitted.
pub async fn check(config: &Config) -> bool {
    let Nodes::Redis(urls) = &config.nodes else {
        println!("configuration: valid");
        println!("nodes: embedded in the process; nothing to check, and nothing survives a restart of the gateway");
        return true;
    };
    println!("configuration: valid");
    let (mut admitted, mut later) = (0, 0);
    let mut seen: Vec<(String, &RedisUrl)> = Vec::new();
    for (url, settings) in with_settings(config, urls) {
        match probe(url, &settings).await {
            Ok(found) => {
                if let Some((_, other)) = seen.iter().find(|(run_id, _)| *run_id == found.facts.run_id) {
                    println!(
                        "{url}: REFUSED: it is the same Redis process as {other}; a quorum needs independent masters"
                    );
                    continue;
                }
                seen.push((found.facts.run_id.clone(), url));
                let clock_agrees =
                    found.clock_offset_micros.unsigned_abs() <= config.settings.clock_skew.as_micros() as u64;
                admitted += usize::from(found.verdict == Verdict::Admitted && clock_agrees);
                later += usize::from(matches!(found.verdict, Verdict::Quarantined(..)) && clock_agrees);
                print_probe(url, &found, &settings, config.settings.clock_skew);
            }
            Err(why) => println!("{url}: UNREACHABLE: {why}"),
        }
    }
    let needed = Quorum::new(urls.len()).map_or(0, Quorum::size);
    let enough = admitted >= needed;
    let verdict = if enough { "ok" } else { "NOT ENOUGH" };
    let waiting = if later == 0 { String::new() } else { format!(", {later} after a quarantine") };
    println!("{verdict}: {admitted} of {} nodes would be admitted now{waiting}, {needed} needed", urls.len());
    enough
}

fn print_probe(url: &RedisUrl, found: &Probe, settings: &RedisSettings, skew: Duration) {
    let facts = &found.facts;
    let marker = match &found.marker {
        None => "marker absent".to_owned(),
        Some(marker) if marker.starts_with(settings.cluster_config().marker_prefix()) => "marker ours".to_owned(),
        Some(_) => "marker FOREIGN".to_owned(),
    };
    let offset = found.clock_offset_micros as f64 / 1000.0;
    let far = Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew / 2;
    let warning = if far { format!(" (TOO FAR: more than half of {})", show(skew)) } else { String::new() };
    println!(
        "{url}: Redis {}, role {}, policy {}, {}, {marker}, clock {offset:+.1} ms{warning}, evicted {}",
        facts.version,
        facts.role,
        if facts.policy.is_empty() { "unknown" } else { &facts.policy },
        facts.durability,
        facts.evicted_keys,
    );
    match &found.verdict {
        Verdict::Refused(diagnosis) => println!("  REFUSED: {}", in_words(diagnosis)),
        Verdict::Admitted | Verdict::Quarantined(..)
            if Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew =>
        {
            println!("  WOULD REFUSE every vote: its clock is more than {} from this machine's", show(skew));
        }
        Verdict::Admitted => println!("  would be admitted at once"),
        Verdict::Quarantined(wait, diagnosis) => {
            let (wait, why) = (show(*wait), in_words(diagnosis));
            println!("  WOULD WAIT {wait}, counted from when a gateway first sees it so: {why}");
        }
    }
}

/// Moves all nodes to this configuration's markers: stops their votes, waits until no lock of the old configuration can
/// live, and writes the new markers. All new nodes must answer.
///
/// When the node set changes, the old one has to be named, because markers know only its hash: gateways that still run on
/// it would go on granting on the nodes that leave. So many of the old nodes are stopped that no majority of them is left;
/// one that is lost for good need not answer. An interrupted run is taken up by running it again: the markers of the time
/// between keep what it has to wait for.
pub async fn reconfigure(config: &Config, old: &Old, really: bool) -> Result<(), String> {
    let Nodes::Redis(urls) = &config.nodes else {
        return Err("--node: none given; embedded nodes have no markers".into());
    };
    let nodes = with_settings(config, urls);
    let settings = &nodes[0].1;
    old.check_name(config, urls)?;
    let mut change = Change { longest: config.settings.limits.max_ttl.duration(), left: None };
    let mut seen: Vec<(String, &RedisUrl)> = Vec::new();
    for (url, settings) in &nodes {
        let found = probe(url, settings).await.map_err(|why| format!("{url}: {why}; all nodes must answer"))?;
        if let Some(diagnosis) = found.facts.unfit() {
            return Err(format!("{url}: {}", in_words(&diagnosis)));
        }
        if let Some((_, other)) = seen.iter().find(|(run_id, _)| *run_id == found.facts.run_id) {
            return Err(format!("{url}: it is the same Redis process as {other}; a quorum needs independent masters"));
        }
        seen.push((found.facts.run_id.clone(), url));
        change.note(url, &found, settings)?;
    }
    let leaving = leaving_nodes(old, urls, settings, &mut change).await?;
    let wait = quarantine(change.longest, config.settings.clock_skew);
    if !really {
        let wait = show(wait);
        println!("nothing was changed; with --yes: these nodes give no votes for {wait}, then the new markers count");
        return Ok(());
    }
    let left = change.left.as_deref().unwrap_or(settings.cluster_config().node_set());
    let under_way = NewMarker::UnderWay { longest_ttl: change.longest, left };
    for url in urls.iter().chain(&leaving) {
        overwrite_marker(url, settings, under_way).await.map_err(|why| format!("{url}: {why}; run it again"))?;
    }
    println!("these nodes give no votes now; waiting {} until no lock of the old configuration can live", show(wait));
    println!(
        "start no gateway of the new configuration before this ends, and let none of the old one run on: it would take"
    );
    println!("a leaving node up again when that loses its data");
    tokio::time::sleep(wait).await;
    for (url, settings) in &nodes {
        overwrite_marker(url, settings, NewMarker::Final).await.map_err(|why| format!("{url}: {why}; run it again"))?;
    }
    println!("done: {} nodes carry the new marker", urls.len());
    Ok(())
}

/// The configuration that is being left, as far as markers do not tell it.
pub struct Old {
    pub nodes: Vec<String>,
    pub cluster: Option<String>,
}

impl Old {
    fn urls(&self) -> Result<Vec<RedisUrl>, String> {
        let parse = |text: &String| RedisUrl::parse(text).map_err(|error| format!("--old-node: {error}"));
        self.nodes.iter().map(parse).collect()
    }

    /// Under one name, markers cannot tell one list of nodes from another.
    fn check_name(&self, config: &Config, urls: &[RedisUrl]) -> Result<(), String> {
        let Some(name) = &config.settings.cluster else { return Ok(()) };
        let same_name = self.cluster.as_ref().is_none_or(|old| old == name);
        let old = self.urls()?;
        let other_list =
            old.len() != urls.len() || old.iter().any(|old| urls.iter().all(|url| url.name() != old.name()));
        if same_name && !old.is_empty() && other_list {
            return Err(format!(
                "--cluster: {name:?} stands for the old list of nodes, and markers could not tell the two apart; give the new \
                 list another name, and --old-cluster {name:?}"
            ));
        }
        Ok(())
    }
}

/// What the markers that stand say of the configuration that is being left.
struct Change {
    longest: Duration,
    /// The hash of its node set, when that is another one.
    left: Option<String>,
}

impl Change {
    fn note(&mut self, url: &RedisUrl, found: &Probe, settings: &RedisSettings) -> Result<(), String> {
        let stands = found.marker.as_deref().unwrap_or_default();
        println!("{url}: marker is {stands:?}, will be {:?}", settings.cluster_config().marker_prefix());
        self.longest = self.longest.max(ClusterConfig::max_ttl_of(stands).unwrap_or_default());
        let other = ClusterConfig::node_set_of(stands).filter(|set| *set != settings.cluster_config().node_set());
        match (other, &self.left) {
            (Some(other), Some(left)) if other != left => Err(format!(
                "{url}: its marker is of node set {other}, another node's of {left}; a set can be left for one other only"
            )),
            (Some(other), None) => {
                self.left = Some(other.to_owned());
                Ok(())
            }
            (Some(_) | None, _) => Ok(()),
        }
    }
}

/// The nodes of the old set that are not in the new one and answer. Checked: they are the old set, and with them no
/// majority of it goes on voting.
async fn leaving_nodes(
    old: &Old,
    urls: &[RedisUrl],
    settings: &RedisSettings,
    change: &mut Change,
) -> Result<Vec<RedisUrl>, String> {
    let Some(left) = change.left.clone() else { return Ok(Vec::new()) };
    let old_cluster = old.cluster.as_deref();
    let old = old.urls()?;
    let old_set = match old_cluster {
        Some(name) => named_cluster(name, old.len()),
        None => ClusterConfig::cluster_of_nodes(old.iter().map(RedisUrl::name)),
    };
    if ClusterConfig::new(&old_set, change.longest).node_set() != left {
        let given = if old.is_empty() { "none".to_owned() } else { old_set };
        return Err(format!(
            "--old-node: the markers are of node set {left}, and the nodes given ({given}) are not that set; name every \
             node that the gateways used until now (and --old-cluster, if they used a name), so that those which leave stop \
             voting too"
        ));
    }
    let stays = |url: &&RedisUrl| urls.iter().any(|new| new.name() == url.name());
    let staying = old.iter().filter(stays).count();
    let mut leaving = Vec::new();
    for url in old.iter().filter(|url| !stays(url)) {
        match probe(url, settings).await {
            Ok(found) => {
                let stands = found.marker.as_deref().unwrap_or_default();
                println!("{url}: marker is {stands:?}, leaves");
                change.longest = change.longest.max(ClusterConfig::max_ttl_of(stands).unwrap_or_default());
                leaving.push(url.clone());
            }
            Err(why) => println!("{url}: {why}; leaves without having answered"),
        }
    }
    let needed = Quorum::new(old.len()).map_or(0, Quorum::blocking);
    let stopped = staying + leaving.len();
    if stopped < needed {
        return Err(format!(
            "--old-node: {stopped} of {} old nodes can be stopped, {needed} are needed so that no majority of them goes on \
             voting",
            old.len()
        ));
    }
    Ok(leaving)
}

async fn probe(url: &RedisUrl, settings: &RedisSettings) -> Result<Probe, String> {
    redlock_core::node::redis::probe(url, settings, (&SystemClock, &OsEntropy)).await
}

/// The nodes, of which there is at least one, each with the settings of its place in the list.
fn with_settings<'a>(config: &Config, urls: &'a [RedisUrl]) -> Vec<(&'a RedisUrl, RedisSettings)> {
    let names: Vec<String> = urls.iter().map(|url| url.name().to_owned()).collect();
    let cluster = cluster_name(config, &names);
    urls.iter().enumerate().map(|(place, url)| (url, redis_settings(config, &cluster, place))).collect()
}

/// The lines of a new key: itself, and what stands for it in the keys file.
///
/// # Errors
/// What of it the file would not take.
pub fn new_key(name: &str, verbs: &[Verb], names: &[String], expires: Option<&str>) -> Result<String, String> {
    let secret = Secret::new(name, &OsEntropy);
    let quoted = |texts: Vec<&str>| texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ");
    let verbs = quoted(verbs.iter().map(|verb| verb.word()).collect());
    let names = quoted(names.iter().map(String::as_str).collect());
    let mut entry = format!(
        "[[key]]\nname = {name:?}\nhashes = [{:?}]\nallow = [{{ verbs = [{verbs}], names = [{names}] }}]\n",
        secret.hash_text()
    );
    if let Some(expires) = expires {
        entry.push_str(&format!("expires = {expires}\n"));
    }
    Keys::parse(&entry).map_err(|error| error.trim_start_matches([':', ',', ' ']).to_owned())?;
    Ok(format!("{}\n\n{entry}", secret.expose()))
}

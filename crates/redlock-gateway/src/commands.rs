//! The operator's commands that talk to nodes without serving: `check` and `reconfigure`.

use std::time::Duration;

use redlock_core::clock::SystemClock;
use redlock_core::node::admission::Generation;
use redlock_core::node::redis::{NewMarker, Probe, RedisSettings, RedisUrl, overwrite_marker, probe};
use redlock_core::quorum::Quorum;

use crate::config::{Config, Nodes, show};
use crate::serve::{cluster_name, redis_settings};

/// Reports every node on standard output; true when a majority would be admitted.
pub async fn check(config: &Config) -> bool {
    let Nodes::Redis(urls) = &config.nodes else {
        println!("configuration: valid");
        println!("nodes: embedded in the process; nothing to check, and nothing survives a restart of the gateway");
        return true;
    };
    let settings = settings_of(config, urls);
    println!("configuration: valid");
    let mut admitted = 0;
    for url in urls {
        match probe(url, &settings, &SystemClock).await {
            Ok(found) => {
                let clock_agrees = found.clock_offset_micros.unsigned_abs() <= config.clock_skew.as_micros() as u64;
                admitted += usize::from(found.refusal.is_none() && clock_agrees);
                print_probe(url, &found, &settings, config.clock_skew);
            }
            Err(why) => println!("{url}: UNREACHABLE: {why}"),
        }
    }
    let needed = Quorum::new(urls.len()).map_or(0, Quorum::size);
    let enough = admitted >= needed;
    let verdict = if enough { "ok" } else { "NOT ENOUGH" };
    println!("{verdict}: {admitted} of {} nodes would be admitted, {needed} needed", urls.len());
    enough
}

fn print_probe(url: &RedisUrl, found: &Probe, settings: &RedisSettings, skew: Duration) {
    let facts = &found.facts;
    let durability = match facts.append_only {
        Some(true) => "append-only file on",
        Some(false) => "append-only file OFF: a restart forgets every lock",
        None => "durability unknown",
    };
    let marker = match &found.marker {
        None => "marker absent".to_owned(),
        Some(marker) if marker.starts_with(settings.generation.config()) => "marker ours".to_owned(),
        Some(_) => "marker FOREIGN".to_owned(),
    };
    let offset = found.clock_offset_micros as f64 / 1000.0;
    let far = Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew / 2;
    let warning = if far { format!(" (TOO FAR: more than half of {})", show(skew)) } else { String::new() };
    println!(
        "{url}: Redis {}, role {}, policy {}, {durability}, {marker}, clock {offset:+.1} ms{warning}, evicted {}",
        facts.version,
        facts.role,
        if facts.policy.is_empty() { "unknown" } else { &facts.policy },
        facts.evicted_keys,
    );
    match &found.refusal {
        None if Duration::from_micros(found.clock_offset_micros.unsigned_abs()) > skew => {
            println!("  WOULD REFUSE every vote: its clock is more than {} from this machine's", show(skew));
        }
        None => println!("  would be admitted"),
        Some(why) => println!("  REFUSED: {why}"),
    }
}

/// Moves all nodes to this configuration's markers. All must answer; their votes stop for the time that locks of the old
/// configuration may still live. An interrupted run is taken up by running it again: it waits as long.
///
/// Nodes of the old set that are not in the new one are out of its reach: it says that their gateways must be stopped.
pub async fn reconfigure(config: &Config, really: bool) -> Result<(), String> {
    let Nodes::Redis(urls) = &config.nodes else {
        return Err("--node: none given; embedded nodes have no markers".into());
    };
    let settings = settings_of(config, urls);
    let mut longest = config.limits.max_ttl.duration();
    for url in urls {
        let found =
            probe(url, &settings, &SystemClock).await.map_err(|why| format!("{url}: {why}; all nodes must answer"))?;
        if let Some(why) = found.facts.unfit() {
            return Err(format!("{url}: {why}"));
        }
        let stands = found.marker.unwrap_or_default();
        longest = longest.max(Generation::max_ttl_of(&stands).unwrap_or_default());
        println!("{url}: marker is {:?}, will be {:?}", stands, settings.generation.config());
    }
    let wait = longest + config.clock_skew;
    println!("CAUTION: nodes that leave the set are not among these: first stop every gateway that still uses them");
    if !really {
        println!(
            "nothing was changed; with --yes: these nodes give no votes for {}, then the new markers count",
            show(wait)
        );
        return Ok(());
    }
    for url in urls {
        overwrite_marker(url, &settings, NewMarker::UnderWay { longest_ttl: longest })
            .await
            .map_err(|why| format!("{url}: {why}; run it again"))?;
    }
    println!("these nodes give no votes now; waiting {} until no lock of the old configuration can live", show(wait));
    tokio::time::sleep(wait).await;
    for url in urls {
        overwrite_marker(url, &settings, NewMarker::Final)
            .await
            .map_err(|why| format!("{url}: {why}; run it again"))?;
    }
    println!("done: {} nodes carry the new marker", urls.len());
    Ok(())
}

fn settings_of(config: &Config, urls: &[RedisUrl]) -> RedisSettings {
    let names: Vec<String> = urls.iter().map(|url| url.name().to_owned()).collect();
    redis_settings(config, &cluster_name(config, &names))
}

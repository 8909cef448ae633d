//! A service to be attacked: five masters and a gateway, with keys or without.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::{ClientLike, LuaInterface};
use fred::types::Builder;
use fred::types::config::{Config, ServerConfig};
use serde::Serialize;

use super::attacks::Needs;
use super::requests::{Parts, request};
use crate::conditions::{Condition, Masters};
use crate::contenders::{Running, start_gateway};
use crate::http::Connection;
use crate::servers::Scratch;

/// Whether clients are told apart by keys or by their addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Mode {
    Keys,
    Anonymous,
}

// Not secrets: keys of gateways that live as long as a measurement, on loopback.
const VICTIM: &str = "rlk.victim.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const VICTIM_HASH: &str = "sha256:3ef192dc65c64dd13b39774a83e58315ee37aea48c8be26799693152033fc444";
const ATTACKER: &str = "rlk.attacker.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const ATTACKER_HASH: &str = "sha256:e90628c44d5a7fe42ecec80840b5ec3655dfdb472402acbfdc02d464f2492a09";

impl Mode {
    pub(super) fn victim(self) -> &'static str {
        if self == Self::Keys { VICTIM } else { "" }
    }

    pub(super) fn attacker(self) -> &'static str {
        if self == Self::Keys { ATTACKER } else { "" }
    }
}

/// In the order in which they are dropped.
pub(super) struct Service {
    pub(super) gateway: Running,
    pub(super) masters: Masters,
    _scratch: Scratch,
}

impl Service {
    /// Must be called on the main thread, because it starts processes.
    pub(super) async fn start(program: &Path, needs: &Needs, mode: Mode, more: &[String]) -> Result<Self, String> {
        let scratch = Scratch::create()?;
        let limit = needs.maxmemory.map(|limit| ["--maxmemory", limit, "--maxmemory-policy", "noeviction"]);
        let masters =
            Masters::start_with(Condition::Healthy, limit.as_ref().map_or(&[], |limit| limit), &scratch).await?;
        let mut args = Vec::new();
        if mode == Mode::Keys {
            let path = scratch.write("keys.toml", &keys_file(needs.verbs))?;
            args.push(format!("--auth-keys={}", path.display()));
        }
        args.extend(more.iter().cloned());
        let gateway = start_gateway("redlock-gateway", program, &masters, &args, &scratch).await?;
        let service = Self { gateway, masters, _scratch: scratch };
        if needs.populated > 0 {
            service.populate(needs.populated, mode.victim()).await?;
        }
        Ok(service)
    }

    /// So many more locks, as copies of one that the gateway granted: by way of the gateway it would take long.
    async fn populate(&self, count: u32, key: &str) -> Result<(), String> {
        let mut connection = Connection::open(self.gateway.address).await?;
        let parts = Parts { key, body: r#"{"ttl_ms":300000}"#, ..Parts::default() };
        let answer = connection.exchange(&request("POST", "/locks/victim-first", parts)).await?;
        if answer.status != 201 {
            return Err(format!("a lock to be copied: {}", answer.describe()));
        }
        let mut copied = 0;
        for master in self.masters.addresses() {
            let copy = copy_lock(master, count).await;
            copied += u32::from(copy.map_err(|error| format!("cannot copy a lock at {master}: {error}"))?);
        }
        // One that was late has none.
        if copied >= 3 { Ok(()) } else { Err(format!("a lock that was granted is on {copied} masters only")) }
    }
}

/// Says whether there was one.
async fn copy_lock(master: SocketAddr, count: u32) -> Result<bool, Error> {
    let server = ServerConfig::new_centralized(master.ip().to_string(), master.port());
    let client: Client = Builder::from_config(Config { server, ..Config::default() })
        .with_performance_config(|performance| performance.default_command_timeout = Duration::from_secs(30))
        .build()?;
    client.init().await?;
    let script = "local lock = redis.call('GET', KEYS[1]) if not lock then return 0 end \
                  for i = 1, ARGV[1] do redis.call('SET', 'lock:other-' .. i, lock, 'PX', 3600000) end return 1";
    let found: u32 = client.eval(script, vec!["lock:victim-first"], vec![count]).await?;
    client.quit().await?;
    Ok(found == 1)
}

/// The victim's key and an attacker's that may do as much as its attack needs.
fn keys_file(verbs: &str) -> String {
    let names = if verbs == "list" { "*" } else { r#"attack-*", "line-*"# };
    let verbs = verbs.replace(',', r#"", ""#);

    format!(
        "[[key]]\nname = \"victim\"\nhashes = [\"{VICTIM_HASH}\"]\n\
         allow = [{{ verbs = [\"acquire\", \"extend\", \"release\"], names = [\"victim-*\", \"line-*\"] }}]\n\
         [[key]]\nname = \"attacker\"\nhashes = [\"{ATTACKER_HASH}\"]\n\
         allow = [{{ verbs = [\"{verbs}\"], names = [\"{names}\"] }}]\n"
    )
}

//! What is measured. Each contender is a process of its own on a port of its own and answers the same two calls, so the
//! load need not know which one it talks to. The naive ones are this very program, started again.

use std::ffi::OsString;
use std::iter;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::conditions::{Masters, SCRIPTS_ONLY, module};
use crate::naive::Design;
use crate::servers::{Process, Scratch, free_address, wait_until};
use crate::{http, servers};

/// In the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Contender {
    /// HTTP and JSON both ways, no Redis: the ceiling of any gateway
    Noop,
    /// A hand-written pipelined Redis client, SET NX PX and nothing else: the floor of any gateway on these masters
    Floor,
    /// fred, one command per node and request, SET NX PX
    FredPlain,
    /// fred, one command per node and request, with a fence inside the script
    FredFenced,
    /// The library rslock inside this program, without HTTP
    Rslock,
    /// redlock-gateway, which holds the promises that the others do not, by scripts
    GatewayLua,
    /// The same by the module of the masters
    Gateway,
}

impl Contender {
    pub(crate) const ALL: [Self; 7] =
        [Self::Noop, Self::Floor, Self::FredPlain, Self::FredFenced, Self::Rslock, Self::GatewayLua, Self::Gateway];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Noop => "HTTP no-op",
            Self::Floor => "hand-written floor",
            Self::FredPlain => "fred per node, plain",
            Self::FredFenced => "fred per node, fenced",
            Self::Rslock => "rslock in-process",
            Self::GatewayLua => "redlock-gateway, Lua",
            Self::Gateway => "redlock-gateway",
        }
    }

    pub(crate) fn is_gateway(self) -> bool {
        matches!(self, Self::GatewayLua | Self::Gateway)
    }

    /// Whether it is a library that runs in this program, and no server.
    pub(crate) fn is_in_process(self) -> bool {
        self == Self::Rslock
    }

    /// `None` when the contender is the gateway itself.
    fn design(self) -> Option<Design> {
        match self {
            Self::Noop => Some(Design::Noop),
            Self::Floor => Some(Design::Floor),
            Self::FredPlain => Some(Design::Plain),
            Self::FredFenced => Some(Design::Fenced),
            Self::Rslock | Self::GatewayLua | Self::Gateway => None,
        }
    }
}

/// A server that is ready for requests.
pub(crate) struct Running {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
}

/// The binaries, looked for before anything is started.
pub(crate) struct Programs {
    bench: PathBuf,
    gateway: PathBuf,
}

impl Programs {
    pub(crate) fn find(needs_gateway: bool, gateway: Option<&Path>) -> Result<Self, String> {
        let bench = std::env::current_exe().map_err(|error| format!("cannot find this program's own file: {error}"))?;
        if needs_gateway && module().is_none() {
            return Err("no module for the masters beside this program; build it with `cargo build --release -p redlock-module`".into());
        }
        let gateway = match needs_gateway {
            true => find_gateway(gateway)
                .map_err(|error| format!("{error}, or leave it out with --only noop,floor,fred-plain,fred-fenced"))?,
            false => PathBuf::new(),
        };
        Ok(Self { gateway, bench })
    }

    pub(crate) fn gateway(&self) -> &Path {
        &self.gateway
    }
}

/// The gateway's binary: the one that was named, or the one beside this program.
pub(crate) fn find_gateway(named: Option<&Path>) -> Result<PathBuf, String> {
    let bench = std::env::current_exe().map_err(|error| format!("cannot find this program's own file: {error}"))?;
    let gateway = named.map_or_else(|| bench.with_file_name("redlock-gateway"), Path::to_owned);
    let profile = if cfg!(debug_assertions) { "" } else { "--release " };
    let built = std::fs::metadata(&gateway).and_then(|file| file.modified()).map_err(|error| {
        format!(
            "no gateway at {}: {error}; build it with `cargo build {profile}-p redlock-gateway`, name another binary \
             with --gateway PATH",
            gateway.display()
        )
    })?;
    // Running the benchmark does not rebuild the gateway.
    let age = built.elapsed().unwrap_or_default().as_secs() / 60;
    eprintln!("gateway: {}, built {age} min ago", gateway.display());
    Ok(gateway)
}

/// The load is one client, and uses more new names in a minute than one may by default.
pub(crate) const EVERY_NAME: &str = "--max-new-names-per-minute=100000000";

/// Starts one contender and returns when it says that it is ready.
pub(crate) async fn start(
    contender: Contender,
    programs: &Programs,
    masters: &Masters,
    gateway_args: &[String],
    scratch: &Scratch,
) -> Result<Running, String> {
    let Some(design) = contender.design() else {
        let args: Vec<_> = iter::once(EVERY_NAME.to_owned()).chain(gateway_args.iter().cloned()).collect();
        let login = if contender == Contender::GatewayLua { SCRIPTS_ONLY } else { "" };
        return start_gateway_as(login, contender.label(), &programs.gateway, masters, &args, scratch).await;
    };
    let address = free_address()?;
    let design = design.to_possible_value().expect("no design is skipped").get_name().to_owned();
    let mut args: Vec<OsString> = vec!["naive".into(), design.into(), "--listen".into(), address.to_string().into()];
    args.extend(masters.addresses().flat_map(|master| ["--master".into(), master.to_string().into()]));
    start_server(contender.label(), &programs.bench, &args, address, scratch).await
}

/// Starts a gateway over the masters; of two over the same, the second finds them admitted.
pub(crate) async fn start_gateway(
    name: &str,
    program: &Path,
    masters: &Masters,
    more_args: &[String],
    scratch: &Scratch,
) -> Result<Running, String> {
    start_gateway_as("", name, program, masters, more_args, scratch).await
}

async fn start_gateway_as(
    login: &str,
    name: &str,
    program: &Path,
    masters: &Masters,
    more_args: &[String],
    scratch: &Scratch,
) -> Result<Running, String> {
    let address = free_address()?;
    let mut args: Vec<OsString> = vec!["--listen".into(), address.to_string().into()];
    args.extend(masters.addresses().flat_map(|master| ["--node".into(), format!("redis://{login}{master}").into()]));
    args.push("--bootstrap".into());
    args.extend(more_args.iter().map(OsString::from));
    start_server(name, program, &args, address, scratch).await
}

async fn start_server(
    name: &str,
    program: &Path,
    args: &[OsString],
    address: SocketAddr,
    scratch: &Scratch,
) -> Result<Running, String> {
    let mut process = Process::spawn(name, program, args, scratch)?;
    wait_until(&mut process, servers::READY_WITHIN, async || {
        let mut connection = http::Connection::open(address).await?;
        let answer = connection.get("/readyz").await?;
        match answer.status {
            200 => Ok(()),
            _ => Err(format!("GET /readyz is answered with {}", answer.describe())),
        }
    })
    .await?;
    Ok(Running { process, address })
}

//! Who is measured. Each contender is a process of its own on a port of its own and answers the same two calls, so the
//! load need not know which one it talks to. The naive ones are this very program, started again.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use crate::Running;
use crate::naive::Design;
use crate::servers::{Masters, Process, Scratch, free_address, wait_until};
use crate::{http, servers};

/// In the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Contender {
    /// HTTP and JSON both ways, no Redis: the ceiling of any gateway
    Noop,
    /// fred, one command per node and request, SET NX PX
    FredPlain,
    /// fred, one command per node and request, with a fence inside the script
    FredFenced,
    /// redlock-gateway, which holds the promises that the others do not
    Gateway,
}

impl Contender {
    pub(crate) const ALL: [Self; 4] = [Self::Noop, Self::FredPlain, Self::FredFenced, Self::Gateway];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Noop => "HTTP no-op",
            Self::FredPlain => "fred per node, plain",
            Self::FredFenced => "fred per node, fenced",
            Self::Gateway => "redlock-gateway",
        }
    }

    /// `None` when the contender is the gateway itself.
    fn design(self) -> Option<Design> {
        match self {
            Self::Noop => Some(Design::Noop),
            Self::FredPlain => Some(Design::Plain),
            Self::FredFenced => Some(Design::Fenced),
            Self::Gateway => None,
        }
    }
}

/// The binaries, looked for before anything is started.
pub(crate) struct Programs {
    bench: PathBuf,
    gateway: PathBuf,
}

impl Programs {
    pub(crate) fn find(lineup: &[Contender], gateway: Option<&Path>) -> Result<Self, String> {
        let bench = std::env::current_exe().map_err(|error| format!("cannot find this program's own file: {error}"))?;
        let beside = bench.with_file_name("redlock-gateway");
        let gateway = gateway.unwrap_or(&beside);
        if lineup.contains(&Contender::Gateway) {
            let profile = if cfg!(debug_assertions) { "" } else { "--release " };
            let built = std::fs::metadata(gateway).and_then(|file| file.modified()).map_err(|error| {
                format!(
                    "no gateway at {}: {error}; build it with `cargo build {profile}-p redlock-gateway`, name another \
                     binary with --gateway PATH, or leave it out with --only noop,fred-plain,fred-fenced",
                    gateway.display()
                )
            })?;
            // Running the benchmark does not rebuild the gateway.
            let age = built.elapsed().unwrap_or_default().as_secs() / 60;
            eprintln!("gateway: {}, built {age} min ago", gateway.display());
        }
        Ok(Self { gateway: gateway.to_owned(), bench })
    }
}

/// Starts one contender and returns when it says that it is ready.
pub(crate) async fn start(
    contender: Contender,
    programs: &Programs,
    masters: &Masters,
    gateway_args: &[String],
    scratch: &Scratch,
) -> Result<Running, String> {
    let address = free_address()?;
    let mut args: Vec<OsString> = Vec::new();
    let program = match contender.design() {
        Some(design) => {
            let design = design.to_possible_value().expect("no design is skipped").get_name().to_owned();
            args.extend(["naive".into(), design.into(), "--listen".into(), address.to_string().into()]);
            args.extend(masters.ports().flat_map(|port| ["--master".into(), port.to_string().into()]));
            &programs.bench
        }
        None => {
            args.extend(["--listen".into(), address.to_string().into()]);
            args.extend(masters.ports().flat_map(|port| ["--node".into(), format!("redis://127.0.0.1:{port}").into()]));
            args.push("--bootstrap".into());
            args.extend(gateway_args.iter().map(OsString::from));
            &programs.gateway
        }
    };
    let mut process = Process::spawn(contender.label(), program, &args, scratch)?;
    wait_until(&mut process, servers::READY_WITHIN, async || {
        let mut connection = http::Connection::open(address).await?;
        let answer = connection.exchange(b"GET /readyz HTTP/1.1\r\nhost: bench\r\n\r\n").await?;
        match answer.status {
            200 => Ok(()),
            _ => Err(format!("GET /readyz is answered with {}", answer.describe())),
        }
    })
    .await?;
    Ok(Running { process, address })
}

//! The contenders. Each one, except the library, is a process on its own port. All of these answer
//! the same two requests, so the load treats them alike. A naive contender is this program, started
//! again.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use clap::ValueEnum;
use tempfile::TempDir;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::client::Target;
use crate::masters::{Condition, Masters, SCRIPTS_ONLY, module};
use crate::naive::Design;
use crate::servers::{Process, READY_WITHIN, free_address, scratch, wait_until};

/// The contenders, in the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Contender {
    /// HTTP and JSON both ways, no Redis: the ceiling of any gateway
    Noop,
    /// A hand-written pipelined Redis client, SET NX PX only: the floor of any gateway on Redis
    Floor,
    /// fred, one command per node and request, SET NX PX
    FredPlain,
    /// fred, one command per node and request, with a fence inside the script
    FredFenced,
    /// The library rslock inside this program, without HTTP
    Rslock,
    /// redlock-gateway by scripts, with promises that the others do not make
    GatewayLua,
    /// redlock-gateway by the module of the masters
    Gateway,
    /// redlock-gateway with an API key in every request
    GatewayKeys,
    /// redlock-gateway by TLS
    GatewayTls,
}

impl Contender {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Noop => "HTTP no-op",
            Self::Floor => "hand-written floor",
            Self::FredPlain => "fred per node, plain",
            Self::FredFenced => "fred per node, fenced",
            Self::Rslock => "rslock in-process",
            Self::GatewayLua => "redlock-gateway, Lua",
            Self::Gateway => "redlock-gateway",
            Self::GatewayKeys => "redlock-gateway, keys",
            Self::GatewayTls => "redlock-gateway, TLS",
        }
    }

    /// The design of a naive contender. `None` for a gateway, and for a library that runs in this
    /// program.
    fn design(self) -> Option<Design> {
        match self {
            Self::Noop => Some(Design::Noop),
            Self::Floor => Some(Design::Floor),
            Self::FredPlain => Some(Design::Plain),
            Self::FredFenced => Some(Design::Fenced),
            Self::Rslock
            | Self::GatewayLua
            | Self::Gateway
            | Self::GatewayKeys
            | Self::GatewayTls => None,
        }
    }

    pub(crate) fn is_gateway(self) -> bool {
        self.design().is_none() && self != Self::Rslock
    }
}

/// A server that is ready for requests.
pub(crate) struct Running {
    pub(crate) process: Process,
    pub(crate) target: Target,
}

/// A gateway over healthy masters. The fields are dropped in this order.
pub(crate) struct Setup {
    pub(crate) gateway: Running,
    pub(crate) masters: Masters,
    _scratch: TempDir,
}

/// The binaries. They are found before anything is started.
pub(crate) struct Programs {
    bench: PathBuf,
    gateway: PathBuf,
    /// Further arguments that the user wants for every gateway.
    gateway_args: Vec<String>,
}

impl Programs {
    /// Finds the gateway's binary: the one that the user named, or the one beside this program.
    pub(crate) fn find(gateway: Option<&Path>, gateway_args: &[String]) -> Result<Self, String> {
        let bench = std::env::current_exe()
            .map_err(|error| format!("cannot find this program's own file: {error}"))?;
        let gateway =
            gateway.map_or_else(|| bench.with_file_name("redlock-gateway"), Path::to_owned);
        // Children run in directories of their own, so the path must be absolute.
        let gateway = std::path::absolute(gateway).map_err(|error| error.to_string())?;
        Ok(Self { gateway, bench, gateway_args: gateway_args.to_vec() })
    }

    /// Checks that a gateway can be started, and that masters can load the module.
    pub(crate) fn check(&self) -> Result<(), String> {
        if module().is_none() {
            return Err(
                "no module beside this program: `cargo build --release -p redlock-module`".into()
            );
        }
        let built = std::fs::metadata(&self.gateway).and_then(|file| file.modified()).map_err(|error| {
            let path = self.gateway.display();
            format!("no gateway at {path}: {error}; `cargo build --release -p redlock-gateway`, or --gateway PATH")
        })?;
        // Cargo does not rebuild the gateway when the benchmark runs, so this shows which binary is
        // measured.
        eprintln!(
            "gateway: {}, built {} min ago",
            self.gateway.display(),
            built.elapsed().unwrap_or_default().as_secs() / 60
        );
        Ok(())
    }

    /// Starts one contender and returns when it is ready. Must be called on the main thread.
    pub(crate) async fn start(
        &self,
        contender: Contender,
        masters: &Masters,
        scratch: &TempDir,
    ) -> Result<Running, String> {
        let Some(design) = contender.design() else {
            let mut args = Vec::new();
            let mut target = Target::plain(free_address()?);
            match contender {
                Contender::GatewayKeys => {
                    args.push(format!("--auth-keys={}", keys_file(scratch)?.display()));
                    target = target.with_key(KEY);
                }
                Contender::GatewayTls => {
                    let (cert, key) = certificate(scratch)?;
                    target.tls = Some(trusting(&cert)?);
                    args.extend([
                        format!("--tls-cert={}", cert.display()),
                        format!("--tls-key={}", key.display()),
                    ]);
                }
                _ => {}
            }
            let login = if contender == Contender::GatewayLua { SCRIPTS_ONLY } else { "" };
            return self
                .start_gateway(contender.label(), target, login, masters, &args, scratch)
                .await;
        };
        let target = Target::plain(free_address()?);
        let design =
            design.to_possible_value().expect("no design is skipped").get_name().to_owned();
        let mut args: Vec<OsString> =
            ["naive", &design, "--listen", &target.address.to_string()].map(Into::into).into();
        args.extend(
            masters.addresses().flat_map(|master| ["--master".into(), master.to_string().into()]),
        );
        start_server(contender.label(), &self.bench, &args, target, scratch).await
    }

    /// Starts healthy masters, and a gateway over them.
    pub(crate) async fn set_up(&self, args: &[String]) -> Result<Setup, String> {
        let scratch = scratch()?;
        let masters = Masters::start(Condition::Healthy, &scratch).await?;
        let target = Target::plain(free_address()?);
        let gateway = self.start_gateway("redlock-gateway", target, "", &masters, args, &scratch);
        Ok(Setup { gateway: gateway.await?, masters, _scratch: scratch })
    }

    /// Starts a gateway over the masters. If another gateway has used the masters before, it finds
    /// them admitted.
    pub(crate) async fn start_gateway(
        &self,
        name: &str,
        target: Target,
        login: &str,
        masters: &Masters,
        args: &[String],
        scratch: &TempDir,
    ) -> Result<Running, String> {
        let mut all: Vec<OsString> =
            vec!["--listen".into(), target.address.to_string().into(), "--bootstrap".into()];
        all.extend(
            masters
                .addresses()
                .flat_map(|master| ["--node".into(), format!("redis://{login}{master}").into()]),
        );
        all.extend(args.iter().chain(&self.gateway_args).map(OsString::from));
        start_server(name, &self.gateway, &all, target, scratch).await
    }
}

async fn start_server(
    name: &str,
    program: &Path,
    args: &[OsString],
    target: Target,
    scratch: &TempDir,
) -> Result<Running, String> {
    let mut process = Process::spawn(name, program, args, scratch)?;
    wait_until(&mut process, READY_WITHIN, async || {
        let answer = target.open().await?.get("/readyz").await?;
        if answer.status == 200 {
            Ok(())
        } else {
            Err(format!("GET /readyz is answered with {}", answer.describe()))
        }
    })
    .await?;
    Ok(Running { process, target })
}

// These are no secrets: they are keys of gateways that run on loopback, only during a measurement.
const KEY: &str = "rlk.victim.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
const KEY_HASH: &str = "sha256:3ef192dc65c64dd13b39774a83e58315ee37aea48c8be26799693152033fc444";

fn keys_file(scratch: &TempDir) -> Result<PathBuf, String> {
    let verbs = r#"["acquire", "extend", "release", "metrics"]"#;
    let rights = format!(r#"allow = [{{ verbs = {verbs}, names = ["*"] }}]"#);
    let path = scratch.path().join("keys.toml");
    let text = format!("[[key]]\nname = \"victim\"\nhashes = [\"{KEY_HASH}\"]\n{rights}\n");
    std::fs::write(&path, text)
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    Ok(path)
}

/// Makes a self-signed certificate and its key.
fn certificate(scratch: &TempDir) -> Result<(PathBuf, PathBuf), String> {
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| scratch.path().join(name));
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let made = Command::new("openssl")
        .args(["req", "-x509", "-days", "2", "-subj", "/CN=redlock-bench"])
        .args([
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ])
        .args(curve)
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&cert)
        .output()
        .map_err(|error| format!("cannot run openssl: {error}"))?;
    let error =
        || format!("openssl made no certificate: {}", String::from_utf8_lossy(&made.stderr));
    made.status.success().then_some((cert, key)).ok_or_else(error)
}

fn trusting(certificate: &Path) -> Result<TlsConnector, String> {
    let mut trusted = RootCertStore::empty();
    let read = CertificateDer::from_pem_file(certificate).map_err(|error| error.to_string())?;
    trusted.add(read).map_err(|error| error.to_string())?;
    let config = ClientConfig::builder().with_root_certificates(trusted).with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

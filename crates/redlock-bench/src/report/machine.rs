//! What was measured on, and what was measured with.

use std::fmt::{self, Display, Formatter};
use std::process::Command;

use serde::{Deserialize, Serialize};

/// What it was measured on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    pub(crate) cpu: String,
    pub(crate) kernel: String,
    pub(crate) redis: String,
}

impl Machine {
    pub(crate) fn look() -> Result<Self, String> {
        let output = Command::new("redis-server")
            .arg("--version")
            .output()
            .map_err(|error| format!("cannot run redis-server, which must be on the PATH: {error}"))?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        let redis = version.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or(version.trim());
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':')).map(|(_, name)| name);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Ok(Self {
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            cpu: cpu.unwrap_or("unknown CPU").trim().into(),
            kernel: kernel.trim().into(),
            redis: redis.into(),
        })
    }
}

impl Display for Machine {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { cores, cpu, kernel, redis } = self;
        write!(f, "{cores} cores, {cpu}, Linux {kernel}, Redis {redis}")
    }
}

/// The tree that the figures are of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Source {
    pub(crate) version: String,
    /// `None` where there is no git or no repository.
    pub(crate) commit: Option<String>,
    /// Whether files that git knows differed from the commit.
    pub(crate) dirty: bool,
    /// A debug build's figures mean nothing.
    pub(crate) debug_build: bool,
}

impl Source {
    /// As the tree that this program was built from is now.
    pub(crate) fn look() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            commit: git(&["rev-parse", "HEAD"]).filter(|commit| !commit.is_empty()),
            dirty: git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty()),
            debug_build: cfg!(debug_assertions),
        }
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "version {}", self.version)?;
        if let Some(commit) = &self.commit {
            write!(f, ", commit {}", commit.get(..12).unwrap_or(commit))?;
        }
        f.write_str(if self.dirty { " with changes" } else { "" })?;
        f.write_str(if self.debug_build { ", DEBUG BUILD: the figures mean nothing" } else { "" })
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

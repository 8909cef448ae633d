//! The list of nodes, and the password for nodes whose URL has none.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use redlock_core::node::redis::{RedisUrl, RedisUrlError};
use redlock_core::quorum::Quorum;

use super::value::listed;

const EMBEDDED_NODES: usize = 5;

/// Why there is no usable list of nodes. No text has a password.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    #[error("--node-password-file: {}: {source}", path.display())]
    PasswordUnreadable { path: PathBuf, source: io::Error },
    #[error(
        "--node-password-file: {}: {what}; expected one line with the password of the nodes",
        path.display()
    )]
    NoPassword { path: PathBuf, what: &'static str },
    #[error("--node-password-file: {}: {why}, so no login would use it", path.display())]
    PasswordUnused { path: PathBuf, why: &'static str },
    // The URL is not quoted: it may have a password in it.
    #[error("--node, number {number}: {source}")]
    Url { number: usize, source: RedisUrlError },
    #[error("--node: {0} is given twice; a quorum needs independent masters")]
    Twice(RedisUrl),
    #[error(
        "--node: given, and names no node; expected redis://[[user]:password@]host[:port][/db]"
    )]
    Empty,
    #[error(
        "--node: none is given, and {0} is reachable from other machines: the locks would be in \
         the memory of this process alone, and no other gateway would know of them; give 3 or 5 \
         Redis masters, or --embedded"
    )]
    EmbeddedByDefault(SocketAddr),
    #[error(
        "--embedded: not allowed beside --node, of which {0} are given; leave out one of the two"
    )]
    EmbeddedBesideNodes(usize),
    #[error("--node: {0} nodes given; allowed are 1 to {max}", max = Quorum::MAX_NODES)]
    TooMany(usize),
}

/// The content of `--node-password-file`.
#[derive(Clone, Default)]
pub struct NodePassword(Option<String>);

impl NodePassword {
    pub(super) fn read(path: Option<&Path>) -> Result<Self, NodesError> {
        let Some(path) = path else { return Ok(Self(None)) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| NodesError::PasswordUnreadable { path: path.to_owned(), source })?;
        // Editors end the line with a newline, which is removed. Everything else belongs to the
        // password.
        let text =
            text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
        let wrong = |what| Err(NodesError::NoPassword { path: path.to_owned(), what });
        match text {
            "" => wrong("it is empty"),
            text if text.contains(['\n', '\r']) => wrong("it has several lines"),
            text => Ok(Self(Some(text.to_owned()))),
        }
    }

    /// Adds the password to a URL without one.
    pub fn give(&self, url: RedisUrl) -> RedisUrl {
        match &self.0 {
            Some(password) if url.credentials().1.is_none() => url.with_password(password),
            _ => url,
        }
    }
}

impl fmt::Debug for NodePassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "given" } else { "none" })
    }
}

/// Where locks are stored.
#[derive(Debug, Clone)]
pub enum Nodes {
    /// The number of in-memory nodes in this process.
    Embedded(usize),
    Redis(Vec<RedisUrl>),
}

pub(super) struct Given<'a> {
    pub(super) urls: &'a [String],
    pub(super) embedded: bool,
    pub(super) password_file: Option<&'a Path>,
}

impl Given<'_> {
    /// `open_to_others`: the listening address, if other machines can reach it.
    pub(super) fn resolve(
        self,
        password: &NodePassword,
        open_to_others: Option<SocketAddr>,
    ) -> Result<Nodes, NodesError> {
        let mut urls: Vec<RedisUrl> = Vec::new();
        for (index, text) in listed(self.urls).enumerate() {
            let url = RedisUrl::parse(text)
                .map_err(|source| NodesError::Url { number: index + 1, source })?;
            if urls.iter().any(|other| other.name() == url.name()) {
                return Err(NodesError::Twice(url));
            }
            urls.push(url);
        }
        let has_own = |url: &RedisUrl| url.credentials().1.is_some();
        if let Some(path) = self.password_file.filter(|_| urls.iter().all(has_own)) {
            let why = if urls.is_empty() {
                "no --node is given"
            } else {
                "every --node has a password of its own"
            };
            return Err(NodesError::PasswordUnused { path: path.to_owned(), why });
        }
        match (urls.len(), open_to_others) {
            (0, _) if !self.urls.is_empty() => Err(NodesError::Empty),
            (0, Some(address)) if !self.embedded => Err(NodesError::EmbeddedByDefault(address)),
            (0, _) => Ok(Nodes::Embedded(EMBEDDED_NODES)),
            (given, _) if self.embedded => Err(NodesError::EmbeddedBesideNodes(given)),
            (given, _) if given > Quorum::MAX_NODES => Err(NodesError::TooMany(given)),
            _ => Ok(Nodes::Redis(urls.into_iter().map(|url| password.give(url)).collect())),
        }
    }
}

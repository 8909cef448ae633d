//! What an operator can do about a node, in terms of the gateway's flags and commands.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::{Diagnosis, NodeState, NodeStatus, Remedy};

use crate::config::show;

/// Sections of the operators' documentation, as paths of this gateway. Each is a page of docs/ and a
/// heading.
pub(crate) mod section {
    pub(crate) const QUORUM_LOST: &str = "/docs/symptoms#quorum-lost";
    pub(crate) const MASTER_MEMORY: &str = "/docs/symptoms#memory-of-the-masters-is-short";
    pub(crate) const LIMIT_IS_NEAR: &str = "/docs/symptoms#a-limit-is-near";
    pub(crate) const AUDIT_LOG: &str = "/docs/runbook#the-disk-of-the-audit-log-is-full";
    pub(crate) const DRAINING: &str = "/docs/runbook#upgrading-gateways";
}

/// The URL of this gateway for people (`--public-url`), without a slash at its end. Empty if the
/// gateway does not know its URL.
#[derive(Debug, Clone, Default)]
pub struct PublicUrl(Arc<str>);

impl PublicUrl {
    pub fn new(url: Option<&str>) -> Self {
        Self(url.unwrap_or_default().into())
    }

    /// The link to a section.
    pub(crate) fn link(&self, section: &str) -> String {
        format!("{}{section}", self.0)
    }
}

/// The remedy as advice. Names the flag or command that helps, if there is one.
pub(crate) fn in_flags(remedy: Remedy) -> Cow<'static, str> {
    Cow::Borrowed(match remedy {
        Remedy::GiveCredentials => "give user and password in the URL of --node",
        Remedy::ChangeKeyPrefix => {
            "another program uses the key of the marker: choose another --key-prefix"
        }
        Remedy::NameEachNodeOnce => {
            "give every master once; with --cluster, list the nodes in the same order on all gateways; after an intended \
             change run `redlock-gateway reconfigure`"
        }
        Remedy::NameNodesAlike => {
            "give every gateway the same --node URLs, spelled alike, or the same --cluster; only after an intended change \
             run `redlock-gateway reconfigure`"
        }
        Remedy::Reconfigure => {
            "give every gateway the same --max-ttl and --clock-skew; only after an intended change run \
             `redlock-gateway reconfigure`"
        }
        Remedy::FinishChange => {
            "wait until the running `redlock-gateway reconfigure` has ended; if it was interrupted, run the same command again"
        }
        Remedy::TrustNodeCertificate => {
            "the node's certificate must come from --node-ca, be valid now and name the host of --node"
        }
        Remedy::GiveClientCertificate => {
            "the node wants a certificate: give --node-cert and --node-key"
        }
        Remedy::TrustClientAuthority => {
            "the node does not trust the authority that issued --node-cert"
        }
        Remedy::ReplaceClientCertificate => {
            "the node does not accept the certificate of --node-cert"
        }
        Remedy::RenewClientCertificate => "renew the certificate of --node-cert",
        other => return Cow::Owned(other.to_string()),
    })
}

/// What to do about a node now. `left` is the time until its quarantine ends.
pub(crate) fn advice(status: &NodeStatus, left: Option<Duration>) -> Option<String> {
    let Some(remedy) = status.remedy else {
        let is_away = status.state == NodeState::Connecting;
        return is_away.then(|| {
            "start the master again, with its data, or repair the network; other masters recover their locks from it".into()
        });
    };
    let text = in_flags(remedy);
    let rest = left.and_then(|left| Some((left, text.strip_prefix("wait")?)));
    Some(match rest {
        // Recovery from the other masters may end a quarantine earlier.
        Some((left, rest)) => {
            format!("wait at most {}{rest}", show(Duration::from_secs(left.as_secs() + 1)))
        }
        None => text.into_owned(),
    })
}

/// States why a node does not vote, and what an operator can do.
pub(crate) fn in_words(diagnosis: &Diagnosis) -> String {
    match diagnosis.remedy {
        Some(remedy) => format!("{}; {}", diagnosis.reason, in_flags(remedy)),
        None => diagnosis.reason.clone(),
    }
}

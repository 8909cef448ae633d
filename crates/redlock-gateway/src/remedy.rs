//! What an operator can do about a node, in terms of the gateway's flags and commands.

use std::borrow::Cow;

use redlock_core::node::{Diagnosis, Remedy};

/// Sections of the operators' documentation: a page of docs/ and a heading. The texts name no host,
/// because the documentation may be served anywhere.
pub(crate) mod section {
    pub(crate) const QUORUM_LOST: &str = "operations.md#quorum-lost";
    pub(crate) const MASTER_MEMORY: &str = "operations.md#memory-of-the-masters-is-short";
    pub(crate) const LIMIT_IS_NEAR: &str = "operations.md#a-limit-is-near";
    pub(crate) const AUDIT_LOG: &str = "runbook.md#the-disk-of-the-audit-log-is-full";
    pub(crate) const DRAINING: &str = "runbook.md#upgrading-gateways";
}

/// The remedy as advice. Names the flag or command that helps, if there is one.
pub(crate) fn in_flags(remedy: Remedy) -> Cow<'static, str> {
    Cow::Borrowed(match remedy {
        Remedy::WaitOrBootstrap => {
            "wait (a brand-new cluster need not wait if its first gateway is \
             started with --bootstrap)"
        }
        Remedy::GiveCredentials => "give user and password in the URL of --node",
        Remedy::ChangeKeyPrefix => {
            "another program uses the key of the marker: choose another --key-prefix"
        }
        Remedy::NameEachNodeOnce => {
            "give every master once; with --cluster, list the nodes in the same order on all gateways; after an intended \
             change run `redlock-gateway reconfigure`"
        }
        Remedy::Reconfigure => "after an intended change run `redlock-gateway reconfigure`",
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

/// States why a node does not vote, and what an operator can do.
pub(crate) fn in_words(diagnosis: &Diagnosis) -> String {
    match diagnosis.remedy {
        Some(remedy) => format!("{}; {}", diagnosis.reason, in_flags(remedy)),
        None => diagnosis.reason.clone(),
    }
}

//! Which addresses callbacks may go to: public ones, and those that the operator allows.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

/// Networks that are not public, or whose addresses stand for others: the special-purpose address
/// registries of IANA (RFC 6890), and multicast. Of IPv6, all that is outside of 2000::/3 is
/// forbidden too.
const SPECIAL: [&str; 19] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
    // Teredo, ORCHID and others.
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "2620:4f:8000::/48",
    "3fff::/20",
];
const GLOBAL_UNICAST: &str = "2000::/3";

/// An address that callbacks may not go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a public address; the operator may allow its network with --callback-network")]
pub struct Forbidden(IpAddr);

/// Networks that the operator allows beside the public ones.
#[derive(Debug, Clone)]
pub struct Networks {
    allowed: Arc<[IpNet]>,
    special: Arc<[IpNet]>,
    global: IpNet,
}

impl Networks {
    pub fn new(allowed: Vec<IpNet>) -> Self {
        let network = |text: &str| text.parse::<IpNet>().expect("a network");
        Self {
            allowed: allowed.into(),
            special: SPECIAL.iter().map(|text| network(text)).collect(),
            global: network(GLOBAL_UNICAST),
        }
    }

    /// Checks an address. An IPv4 address in IPv6 form counts as the IPv4 address.
    pub(super) fn check(&self, address: IpAddr) -> Result<(), Forbidden> {
        let address = address.to_canonical();
        let is_in = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&address));
        let is_public =
            !is_in(&self.special) && (address.is_ipv4() || self.global.contains(&address));
        if is_public || is_in(&self.allowed) { Ok(()) } else { Err(Forbidden(address)) }
    }
}

/// Limit on lookups under way. A lookup that hangs keeps a thread, also when nobody waits for it any
/// more.
const MAX_LOOKUPS: usize = 16;

/// Looks up the addresses of a name. May block.
type Lookup = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Gives the HTTP library only addresses that callbacks may go to.
pub(super) struct CheckedResolver {
    networks: Networks,
    lookup: Arc<Lookup>,
    lookups: Arc<Semaphore>,
}

impl CheckedResolver {
    pub(super) fn of_system(networks: Networks) -> Self {
        Self::new(networks, |name| Ok((name, 0).to_socket_addrs()?.collect()))
    }

    pub(super) fn new(
        networks: Networks,
        lookup: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
        Self { networks, lookup: Arc::new(lookup), lookups }
    }
}

impl Resolve for CheckedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (networks, lookup) = (self.networks.clone(), self.lookup.clone());
        let permit = self.lookups.clone().acquire_owned();
        Box::pin(async move {
            let permit = permit.await?;
            let found = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                lookup(name.as_str())
            });
            let mut forbidden = None;
            let mut allowed = Vec::new();
            for address in found.await?? {
                match networks.check(address.ip()) {
                    Ok(()) => allowed.push(address),
                    Err(error) => forbidden = Some(error),
                }
            }
            match forbidden {
                Some(error) if allowed.is_empty() => Err(error.into()),
                _ => Ok(Box::new(allowed.into_iter()) as Addrs),
            }
        })
    }
}

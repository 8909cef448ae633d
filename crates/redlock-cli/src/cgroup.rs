//! A cgroup (version 2) for the command, where redlock may create one. The kernel can kill all
//! processes of a cgroup at once, also those of another user and those just being started.
//!
//! A service manager owns the tree of cgroups. redlock may create a cgroup in a subtree if the
//! manager allows it (`Delegate=yes`, which systemd marks by the attribute `user.delegate`), or if
//! redlock runs as an ordinary user who owns the subtree.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::getxattr;
use rustix::process::{geteuid, getpid};

/// How many names are tried for a cgroup. Daemons of earlier runs with the same process id may
/// still be in the cgroups with the first names.
const MAX_LEFT_BEHIND: usize = 100;

#[derive(Debug, Clone)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup. `None` if redlock may not create one, or if the kernel cannot kill one
    /// (before 5.14).
    pub(crate) fn create() -> Option<Self> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let parent = own(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))?;
        if !is_delegated(&parent) || !parent.join("cgroup.kill").exists() {
            return None;
        }
        let name = format!("redlock-{}", getpid().as_raw_pid());
        // A daemon that an earlier run with the same process id left behind may still be in a
        // cgroup of this name.
        let mut names = (0..MAX_LEFT_BEHIND).map(|nth| parent.join(format!("{name}-{nth}")));
        names.find(|path| std::fs::create_dir(path).is_ok()).map(Self)
    }

    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Moves this process, and so its future children, into the cgroup.
    pub(crate) fn enter(&self) {
        // A failure is harmless: the processes are then found in the process tree, as without a
        // cgroup.
        let _ = std::fs::write(self.0.join("cgroup.procs"), "0");
    }

    pub(crate) fn kill(&self) {
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
    }

    pub(crate) fn is_populated(&self) -> bool {
        let events = std::fs::read_to_string(self.0.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "populated 1")
    }

    /// Removes the cgroup, unless a daemon is left in it.
    pub(crate) fn remove(&self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The directory of this process's cgroup. A mount may show only a part of the tree of cgroups. The
/// paths below the mount point then begin at the root of that part.
fn own(mounts: &str, cgroups: &str) -> Option<PathBuf> {
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let root = fields.next()?;
        let point = fields.next()?;
        let below = Path::new(path).strip_prefix(root).ok()?;
        source.starts_with("cgroup2 ").then(|| Path::new(point).join(below))
    })
}

fn is_delegated(path: &Path) -> bool {
    let user = geteuid();
    let is_owner = std::fs::metadata(path).is_ok_and(|of| of.uid() == user.as_raw());
    let mut value = [0; 1];
    let is_marked =
        getxattr(path, "user.delegate", &mut value).is_ok_and(|length| value[..length] == *b"1");
    is_marked || is_owner && !user.is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_found_below_its_mount() {
        let mounts = "24 1 0:22 / /proc rw - proc proc rw\n\
                      35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let cgroups = "1:name=systemd:/x\n0::/user.slice/a.scope\n";
        assert_eq!(own(mounts, cgroups), Some("/sys/fs/cgroup/user.slice/a.scope".into()));
        let part = mounts.replace("0:30 / ", "0:30 /user.slice ");
        assert_eq!(own(&part, cgroups), Some("/sys/fs/cgroup/a.scope".into()));
        assert_eq!(own(&part, "0::/other\n"), None);
        assert_eq!(own("", cgroups), None);
        assert_eq!(own(mounts, "1:cpu:/\n"), None);
    }
}

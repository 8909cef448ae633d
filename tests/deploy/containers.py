"""Containers without an engine, made of namespaces. A process in one sees what it would see in a container
of its image. Used by `tests/deploy/start`.

Each container has its own network with resolvable names, a root folder with its files and nothing of
this repository, its user, its environment, and no privileges. Not modelled: cgroups (memory), seccomp,
NetworkPolicy, published ports.
Needs root, iproute2 and util-linux.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PREFIX = f"rl{os.getpid() % 10000}"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Cluster:
    """Networks and the containers in them. All are removed at the end, also after an error."""

    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="containers-"))
        self.dir.chmod(0o755)
        self.networks, self.containers, self.addresses = {}, {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for container in self.containers.values():
            container.kill()
            ip("netns", "del", container.netns, check=False)
        for bridge in self.networks.values():
            ip("link", "del", bridge, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)

    def network(self, name):
        """The bridge of a network, for IPv4 and IPv6. It is made when it is first needed."""
        if name not in self.networks:
            number = len(self.networks) + 1
            bridge = self.networks[name] = f"{PREFIX}b{number}"
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
        return self.networks[name]

    def connect(self, netns, networks, number):
        """Makes a network namespace and connects it to networks. Returns its addresses in each network."""
        ip("netns", "add", netns)
        ip("-n", netns, "link", "set", "lo", "up")
        found = {}
        for name in networks:
            bridge = self.network(name)
            place = list(self.networks).index(name) + 1
            link, inside = f"{netns}v{place}", f"eth{place}"
            ip("link", "add", link, "type", "veth", "peer", "name", inside, "netns", netns)
            ip("link", "set", link, "master", bridge, "up")
            found[name] = [f"10.77.{place}.{number}", f"fd77:{place}::{number}"]
            ip("-n", netns, "address", "add", f"{found[name][0]}/24", "dev", inside)
            ip("-n", netns, "address", "add", f"{found[name][1]}/64", "dev", inside, "nodad")
            ip("-n", netns, "link", "set", inside, "up")
        return found

    def add(self, container):
        container.cluster, container.netns = self, f"{PREFIX}n{len(self.containers) + 1}"
        container.dir = self.dir / container.name
        container.dir.mkdir()
        container.addresses = self.connect(container.netns, container.networks, len(self.containers) + 10)
        self.containers[container.name] = container
        return container

    def hosts(self, container):
        """The hosts file of a container: the names of all containers with which it shares a network. IPv6 comes
        first, as in the answers of a dual-stack cluster."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in self.containers.values():
            for network in set(container.networks) & set(other.networks):
                four, six = other.addresses[network]
                addresses = [six] if other.six_only else [four]
                lines += [f"{address} {' '.join([other.name, *other.aliases])}" for address in addresses]
        return "\n".join(lines) + "\n"


class Container:
    def __init__(self, name, command, networks, user="0:0", env=None, files=None, data=None, root=None, aliases=(),
                 read_only=True, six_only=False):
        """`files`: path inside -> path here. `data`: folders that outlive the container. `root`: the image as a folder;
        without it the container has the programs of this machine."""
        self.name, self.command, self.networks, self.user = name, command, networks, user
        self.env, self.files, self.data, self.root = env or {}, files or {}, data or [], root
        self.aliases, self.read_only, self.six_only, self.process = aliases, read_only, six_only, None

    def spec(self):
        folders = {path: str(self.dir / ("data" + path.replace("/", "-"))) for path in self.data}
        uid, gid = map(int, self.user.split(":"))
        for folder in folders.values():
            Path(folder).mkdir(exist_ok=True)
            os.chown(folder, uid, gid)
        hosts = self.dir / "hosts"
        hosts.write_text(self.cluster.hosts(self))
        return {
            "command": self.command, "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", **self.env}, "uid": uid, "gid": gid,
            "root": str(self.root or ""), "mount": str(self.dir / "root"), "read_only": self.read_only,
            "files": {**{path: str(at) for path, at in self.files.items()}, "/etc/hosts": str(hosts)}, "folders": folders,
        }

    def start(self):
        (self.dir / "root").mkdir(exist_ok=True)
        spec = json.dumps(self.spec())
        self.log = open(self.dir / "log", "ab")
        enter = ["ip", "netns", "exec", self.netns, sys.executable, __file__, spec]
        self.process = subprocess.Popen(enter, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)

    def output_text(self):
        return (self.dir / "log").read_text(errors="replace")

    def run(self, command, timeout=10):
        """Runs a command, for example a probe, inside the container as the container's user."""
        uid, gid = self.user.split(":")
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--net", "--root", "--wd", "--setuid", uid, "--setgid", gid]
        return subprocess.run([*enter, "--", *command], capture_output=True, text=True, timeout=timeout,
                              env={"PATH": "/usr/local/bin:/usr/bin:/bin"})

    def stop(self, grace):
        """Sends SIGTERM, and SIGKILL if the process still runs after the grace. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wipe(self):
        """Deletes all data, as if the disk had been replaced."""
        for folder in self.spec()["folders"].values():
            shutil.rmtree(folder)

    def alive(self):
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.output_text()[-3000:]}")


def until(what, holds, limit, alive=()):
    """Asks ten times a second until the answer is true. Returns it, or raises an error after the limit."""
    end = time.monotonic() + limit
    while True:
        for container in alive:
            container.alive()
        found = holds()
        if found:
            return found
        if time.monotonic() > end:
            outputs = "\n".join(f"--- {container.name}:\n{container.output_text()[-1500:]}" for container in alive)
            raise AssertionError(f"not within {limit} s: {what}\n{outputs}")
        time.sleep(0.1)


def enter(spec):
    """Runs in the new network: makes the root folder, changes into it, drops all privileges, and becomes the program."""
    root = spec["mount"]

    def mount(*words):
        subprocess.run(["mount", *words], check=True)

    def inside(path):
        return root + path

    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root)
    if spec["root"]:
        shutil.copytree(spec["root"], root, symlinks=True, dirs_exist_ok=True)
    else:
        os.mkdir(inside("/usr"))
        mount("--bind", "/usr", inside("/usr"))
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", inside("/usr/local"))
        for name in ["bin", "lib", "lib64", "sbin"]:
            os.symlink(f"usr/{name}", inside(f"/{name}"))
    os.makedirs(inside("/dev"), exist_ok=True)
    os.makedirs(inside("/proc"), exist_ok=True)
    mount("--rbind", "/dev", inside("/dev"))
    mount("-t", "proc", "proc", inside("/proc"))
    for path, at in {**spec["files"], **spec["folders"]}.items():
        target = Path(inside(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if os.path.isdir(at) else target.touch()
        mount("--bind", at, str(target))
        if path in spec["files"]:
            mount("-o", "remount,bind,ro", str(target))
    if spec["read_only"]:
        mount("-o", "remount,ro", root)
    os.chroot(root)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_NOFILE, (16384, 16384))
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(41):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.setgroups([])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: after setuid, which clears it
    os.execvpe(spec["command"][0], spec["command"], spec["env"])


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))

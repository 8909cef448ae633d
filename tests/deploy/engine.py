"""A Docker engine for tests, without a registry of images. Used by `tests/deploy/compose` and
`tests/deploy/kubernetes`.

If an engine runs already, `compose` uses it. Otherwise the tests start one in new namespaces for mounts,
networks and processes. The kernel ends everything in such namespaces with their first process, so no
container, mount or network outlives a test. Only cgroups, files and the empty folder /opt/containerd
remain. `in_namespaces` removes the cgroups and files.

What is installed or built here is kept in a cache folder: Docker Compose, from its Go module, and Redis
as a root folder, from Debian packages.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from containers import until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redlock-gateway"
# Updated by hand. The module is built as the main module, because its go.mod excludes versions.
COMPOSE_MODULE, COMPOSE_VERSION = "github.com/docker/compose/v2", "v2.40.3"
# The oldest Compose that accepts docker-compose.yml.
COMPOSE_OLDEST = (2, 23)
PACKAGES = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables", "mmdebstrap": "mmdebstrap",
            "unshare": "util-linux", "setpriv": "util-linux", "ip": "iproute2"}
STATUS_LEFT_OUT = 3
AN_ENGINE = "a Docker engine that runs, or "


class LeftOut(Exception):
    """The test cannot run on this machine. The message names what is missing."""


def environment():
    """The variables for all commands. Debian has dockerd and iptables in sbin, which not every PATH contains."""
    config = {"DOCKER_CONFIG": str(CACHE / "docker-config")} if (CACHE / "docker-config").exists() else {}
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin", **config}


def found(program):
    return shutil.which(program, path=environment()["PATH"])


def run(words, limit=60, **options):
    """Runs a command and returns its output. Raises an error that contains the output if the command fails."""
    options = {"stdin": subprocess.DEVNULL, "env": environment(), **options}
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not within {limit} s: {' '.join(map(str, words))}") from None
    shown = (done.stdout + done.stderr).strip()[-3000:]
    assert done.returncode == 0, f"{' '.join(map(str, words))}: exit status {done.returncode}\n{shown}"
    return done.stdout


def succeeds(words, limit=60):
    try:
        run(words, limit)
        return True
    except (AssertionError, OSError):
        return False


def needed(what, words, limit, **options):
    """Runs a command of the preparation. If it fails, the test is left out."""
    try:
        return run(words, limit, **options)
    except (AssertionError, OSError) as error:
        # The last line of Go's answer in JSON is a brace.
        said = [line.strip() for line in str(error).splitlines() if re.search("[a-z]", line)]
        raise LeftOut(f"{what}: {said[-1]}") from None


# ---- preparing -------------------------------------------------------------------------------------------------------


def engine_runs():
    return bool(found("docker")) and succeeds(["docker", "info", "--format", "{{.ServerVersion}}"], 20)


def prepare(progress, redis_image, ports):
    """Installs and builds what is missing. Returns whether the test has to start an engine of its own."""
    own = not engine_runs()
    if own:
        install(progress)
        namespaces()
    else:
        for port in ports:
            is_free(port)
    compose(progress)
    if own or not image_is_here(redis_image):
        redis_root(progress, redis_image)
    return own


def need_root(instead):
    if os.geteuid() != 0:
        raise LeftOut(f"{instead}root")


def install(progress, packages=PACKAGES, instead=AN_ENGINE):
    """Installs the Debian packages of programs that are missing. `instead` names what would do as well."""
    missing = sorted({package for program, package in packages.items() if not found(program)})
    if not missing:
        return
    need_root(instead)
    if not shutil.which("apt-get"):
        raise LeftOut(f"{instead}these Debian packages: {' '.join(missing)}")
    if Path("/run/systemd/system").exists():
        # The packages would start services and leave them running.
        raise LeftOut(f"{instead}these packages, which a test does not install under systemd: {' '.join(missing)}")
    progress(f"installing {' '.join(missing)} with apt-get")
    quiet = {**environment(), "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    wait = ["-o", "DPkg::Lock::Timeout=300"]
    needed("Debian packages", ["apt-get", *wait, "update", "-qq"], 300, env=quiet)
    needed("Debian packages", ["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *missing], 900, env=quiet)


def namespaces(instead=AN_ENGINE, tried=("iptables", "-t", "nat", "-L", "-n")):
    """Tries what a test needs from the kernel: a command in new namespaces, and cgroups."""
    need_root(instead)
    needed("namespaces for mounts, networks and processes", [*UNSHARE, *tried], 20)
    try:
        for folder in cgroups(f"redlock-try-{os.getpid()}"):
            folder.mkdir()
            folder.rmdir()
    except OSError as error:
        raise LeftOut(f"cgroups that can be written: {error}") from None


def is_free(port):
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            raise LeftOut(f"the free port {port}, which docker-compose.yml publishes") from None


def compose_is_here():
    try:
        version = run(["docker", "compose", "version", "--short"], 20)
    except (AssertionError, OSError):
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= COMPOSE_OLDEST


def compose(progress):
    """Builds Docker Compose if this machine has none, or an old one."""
    plugin = CACHE / "docker-config/cli-plugins/docker-compose"
    if compose_is_here():
        return
    if not shutil.which("go"):
        raise LeftOut("Docker Compose 2, or Go to build it")
    progress(f"building Docker Compose {COMPOSE_VERSION} from its Go module")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compose-", dir=CACHE) as work:
        work = Path(work)
        (work / "go.mod").write_text("module downloaded\n")
        variables = {**environment(), "GOFLAGS": "-buildvcs=false -mod=mod"}
        module = f"{COMPOSE_MODULE}@{COMPOSE_VERSION}"
        source = json.loads(needed("Docker Compose's Go module", ["go", "mod", "download", "-json", module], 600, cwd=work, env=variables))["Dir"]
        shutil.copytree(source, work / "source")
        # The files of Go's module cache are read-only, and the build may write go.sum.
        run(["chmod", "-R", "u+w", work / "source"])
        stamp = f"-s -w -X {COMPOSE_MODULE}/internal.Version={COMPOSE_VERSION}"
        build = ["nice", "-n", "10", "go", "build", "-trimpath", "-ldflags", stamp, "-o", work / "docker-compose", "./cmd"]
        needed("a build of Docker Compose", build, 1800, cwd=work / "source", env=variables)
        plugin.parent.mkdir(parents=True, exist_ok=True)
        (work / "docker-compose").rename(plugin)
    if not compose_is_here():
        raise LeftOut(f"a docker client that runs the plugin {plugin}")


def image_is_here(image):
    return succeeds(["docker", "image", "inspect", image], 20) or succeeds(["docker", "pull", "--quiet", image], 180)


def redis_tar(image):
    return CACHE / f"redis-{image.rpartition('-')[2]}.tar"


def redis_root(progress, image):
    """Makes a root folder with Debian's Redis, as a stand-in for the image `redis:`. Like that image, it runs Redis as
    user 999 in /data, and has no /etc/redis."""
    tar = redis_tar(image)
    if tar.exists():
        return
    if os.geteuid() != 0 or not found("mmdebstrap"):
        raise LeftOut(f"the image {image}, or root and mmdebstrap to make one")
    progress(f"making a root folder with Redis of Debian {image.rpartition('-')[2]}")
    CACHE.mkdir(parents=True, exist_ok=True)
    alike = "rm -rf /etc/redis /var/lib/redis && groupmod -g 999 redis && usermod -u 999 -g 999 redis && mkdir /data && chown 999:999 /data"
    words = ["nice", "-n", "10", "mmdebstrap", "--quiet", "--variant=essential", "--include=redis-server,redis-tools",
             "--dpkgopt=path-exclude=/usr/share/{doc,man,locale}/*", f'--customize-hook=chroot "$1" sh -c "{alike}"',
             image.rpartition("-")[2], f"{tar}.new.tar"]
    needed("a root folder with Debian's Redis", words, 900)
    Path(f"{tar}.new.tar").rename(tar)


# ---- an engine of its own --------------------------------------------------------------------------------------------

UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]


def cgroups(name):
    """The folders of a cgroup: one with cgroup v2, one for each controller with cgroup v1."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top / name]
    return [folder / name for folder in sorted(top.iterdir()) if (folder / "cgroup.procs").exists() and not folder.is_symlink()]


def in_namespaces(words, folder):
    """Runs a command in new namespaces, and ends everything in them when the command or this process ends. Returns the
    exit status. The command finds the name of its cgroup in the variable ENGINE_CGROUP."""
    name = f"redlock-test-{os.getpid()}"
    # In the namespaces, the engines and proxies that these variables name cannot be reached.
    others = ("DOCKER_CONTEXT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    kept = {key: value for key, value in environment().items() if key.upper() not in others}
    variables = {**kept, "DOCKER_HOST": "unix:///var/run/docker.sock", "ENGINE_CGROUP": name}
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *UNSHARE, *words], env=variables)
    try:
        return process.wait()
    finally:
        # The end of the first process in the namespaces ends all others. unshare returns after that.
        if process.poll() is None:
            try:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            except FileNotFoundError:
                children = []
            for pid in children or [process.pid]:
                os.kill(int(pid), signal.SIGKILL)
        try:
            process.wait(30)
            for top in cgroups(name):
                for inner in sorted(top.rglob("*/"), reverse=True) if top.exists() else []:
                    until(f"the cgroup {inner} is empty", lambda: removed(inner), 10)
                until(f"the cgroup {top} is empty", lambda: removed(top), 10)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def removed(cgroup):
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


class Daemon:
    """dockerd in the namespaces of this process.

    Images are in memory, about half a GiB: on a disk, unpacking them and ending their file systems took 40 s of a
    run. Volumes are on the disk, so that masters wait for a real fsync."""

    def __init__(self, folder):
        # The first process of a PID namespace. Anywhere else, the mounts would hide the machine's own folders.
        assert os.getpid() == 1, "an engine is started in namespaces of its own only: see in_namespaces"
        run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
        # dockerd writes a key into this folder.
        if Path("/etc/docker").is_dir():
            run(["mount", "-t", "tmpfs", "tmpfs", "/etc/docker"])
        run(["ip", "link", "set", "lo", "up"])
        data, disk = folder / "docker", folder / "volumes"
        data.mkdir()
        disk.mkdir()
        self.data = data
        run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", data])
        (data / "volumes").mkdir()
        run(["mount", "--bind", disk, data / "volumes"])
        self.log = folder / "dockerd.log"
        words = ["dockerd", "--data-root", data, "--cgroup-parent", f"/{os.environ['ENGINE_CGROUP']}",
                 "--exec-opt", "native.cgroupdriver=cgroupfs"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())
        self.name = "dockerd"
        until("dockerd answers", lambda: succeeds(["docker", "info"], 10), 60, [self])

    def output_text(self):
        return self.log.read_text(errors="replace")

    def alive(self):
        assert self.process.poll() is None, f"dockerd ended with {self.process.returncode}:\n{self.output_text()[-3000:]}"

    def stop(self):
        """Ends the engine, and frees the memory of its images."""
        self.process.terminate()
        self.process.wait(30)
        run(["umount", "--recursive", self.data])


def import_redis(image, name):
    """Makes an image with this name, as a stand-in for the image `redis:`."""
    run(["docker", "import", "--change", "WORKDIR /data", "--change", "VOLUME /data", redis_tar(image), name], 120)


def import_prometheus(image, image_root, folder):
    """Makes an image from this machine's Prometheus. Returns whether there is one."""
    program = found("prometheus")
    if not program:
        return False
    root = folder / "prometheus"
    run(["sh", image_root, program, root])
    (root / "prometheus").mkdir()
    os.chown(root / "prometheus", 65534, 65534)
    run(["tar", "--directory", root, "--create", "--file", folder / "prometheus.tar", "."])
    changes = ["--change", 'ENTRYPOINT ["/usr/local/bin/prometheus"]', "--change", "VOLUME /prometheus"]
    run(["docker", "import", *changes, folder / "prometheus.tar", image], 120)
    return True

"""A Kubernetes of five nodes on this machine, without a registry of images. Used by `tests/deploy/kubernetes`.

Each node has its own containerd, kubelet, kube-proxy and kube-router, in a network namespace of its own.
kube-router enforces NetworkPolicy. A bridge connects the nodes with the control plane, which runs in the
network of this process. All nodes share one kernel, one clock and one disk.

The programs are built from their Go modules once, and kept in the cache folder of engine.py: Kubernetes,
CoreDNS and kube-router. etcd, containerd and the network plugins are those of Debian.
"""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine
from containers import until
from engine import CACHE, LeftOut, environment, needed, run, succeeds

HERE = Path(__file__).resolve().parent
# Updated by hand. The replacements in go.mod have the same minor version, as v0.34.4 has v1.34.4.
KUBERNETES, KUBERNETES_VERSION = "k8s.io/kubernetes", "v1.34.4"
COREDNS, COREDNS_VERSION = "github.com/coredns/coredns", "v1.12.4"
ROUTER, ROUTER_VERSION = "github.com/cloudnativelabs/kube-router/v2", "v2.1.0"
PLUGINS = "/usr/lib/cni"
PACKAGES = {**engine.PACKAGES, "etcd": "etcd-server", "ipset": "ipset", "openssl": "openssl", "gcc": "gcc",
            f"{PLUGINS}/bridge": "containernetworking-plugins", "containerd": "containerd", "nsenter": "util-linux"}
PARTS = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"]

NODES = [f"node-{number}" for number in range(1, 6)]
# Addresses of the control plane, the pods, the services and the DNS. The first node has 10.99.0.11,
# and its pods have 10.244.1.0/24.
CONTROL, PODS, SERVICES, NAMES = "10.99.0.1", "10.244.0.0/16", "10.96.0.0/16", "10.96.0.10"
DISKS_PER_NODE = 5


def number(node):
    return NODES.index(node) + 1


def address(node):
    return f"10.99.0.{10 + number(node)}"


def zone(node):
    """Three zones: zone-a and zone-b with two nodes each, zone-c with one."""
    return f"zone-{'aabbc'[NODES.index(node)]}"


# ---- preparing -------------------------------------------------------------------------------------------------------


def prepare(progress, redis_image):
    """Installs and builds what is missing."""
    engine.need_root("")
    if not shutil.which("go") and not all(built(*program).exists() for program in PROGRAMS):
        raise LeftOut("Go, to build Kubernetes")
    engine.install(progress, PACKAGES, "")
    engine.namespaces("", ["sh", "-euc", TRIED])
    engine.redis_root(progress, redis_image)
    for program, build in PROGRAMS.items():
        if not built(*program).exists():
            progress(f"building {' '.join(program)} from its Go module")
            make(built(*program), build)


# What the networks of nodes, kube-proxy and kube-router need from the kernel.
TRIED = """
ip link add br0 type bridge
ip link add veth0 type veth peer name veth1
ipset create tried hash:ip
iptables -A FORWARD -m set --match-set tried src -m comment --comment tried -m physdev --physdev-is-bridged -j ACCEPT
test -e /proc/sys/net/bridge/bridge-nf-call-iptables || { echo "the kernel has no br_netfilter" >&2; exit 1; }
iptables -t nat -A POSTROUTING -m statistic --mode random --probability 0.5 -m addrtype --src-type LOCAL -j MASQUERADE
"""


def built(name, version):
    return CACHE / "kubernetes" / f"{name}-{version}"


def make(program, build):
    """Builds a program in a new folder, and moves it into the cache."""
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=CACHE) as work:
        build(Path(work))
        (Path(work) / "program").rename(program)


def go(work, *words, limit=3600, **variables):
    settings = {"GOFLAGS": "-buildvcs=false -mod=mod", **variables}
    return needed("Go", ["nice", "-n", "10", "go", *words], limit, cwd=work, env={**environment(), **settings})


def build_main(work, source, stamp="", **variables):
    shutil.copy(HERE / "programs" / source, work / "main.go")
    go(work, "build", "-p", "2", "-trimpath", "-ldflags", f"-s -w {stamp}", "-o", "program", ".", **variables)


def build_kubernetes(work):
    (work / "go.mod").write_text("module downloaded\n")
    module = json.loads(go(work, "mod", "download", "-json", f"{KUBERNETES}@{KUBERNETES_VERSION}"))["GoMod"]
    # Kubernetes refers to its libraries as folders, which its module does not contain. The proxy has
    # each library as a module.
    library = KUBERNETES_VERSION.replace("v1.", "v0.")
    folders = [line.split()[0] for line in Path(module).read_text().splitlines() if " => ./staging/" in line]
    assert folders, f"{module} refers to no folder"
    replaced = "".join(f"replace {name} => {name} {library}\n" for name in folders)
    (work / "go.mod").write_text(f"module redlock.test/kubernetes\n\ngo 1.24.0\n\ngodebug default=go1.24\n\n"
                                 f"require {KUBERNETES} {KUBERNETES_VERSION}\n\n{replaced}")
    major, minor, _ = KUBERNETES_VERSION[1:].split(".")
    values = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    build_main(work, "kubernetes.go", " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items()))


def build_coredns(work):
    (work / "go.mod").write_text(f"module redlock.test/coredns\n\ngo 1.24.0\n\nrequire {COREDNS} {COREDNS_VERSION}\n")
    # Without cgo, the program runs in an image that contains nothing else.
    build_main(work, "coredns.go", CGO_ENABLED="0")


def build_router(work):
    go(work, "install", "-p", "2", "-trimpath", "-ldflags", "-s -w", f"{ROUTER}/cmd/kube-router@{ROUTER_VERSION}", GOBIN=str(work), CGO_ENABLED="0")
    (work / "kube-router").rename(work / "program")


PROGRAMS = {("kubernetes", KUBERNETES_VERSION): build_kubernetes, ("coredns", COREDNS_VERSION): build_coredns,
            ("kube-router", ROUTER_VERSION): build_router}


# ---- networks --------------------------------------------------------------------------------------------------------

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """The network of a process. Inside `with`, the calling thread opens its sockets there."""

    own = None

    def __init__(self, pid):
        Network.own = Network.own or os.open("/proc/self/ns/net", os.O_RDONLY)
        self.inside = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def __enter__(self):
        self.change(self.inside)

    def __exit__(self, *_):
        self.change(Network.own)

    @staticmethod
    def change(network):
        if LIBC.setns(network, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def make_networks():
    """A network for each node. Each one routes to the pods of the others, as a network plugin would do it."""
    def in_node(node, *words):
        run(["nsenter", f"--net=/run/netns/{node}", "--", *words])

    filtered = "net.bridge.bridge-nf-call-iptables"
    run(["ip", "link", "add", "br0", "type", "bridge"])
    run(["ip", "link", "set", "br0", "up"])
    run(["ip", "address", "add", f"{CONTROL}/24", "dev", "br0"])
    # dockerd has left rules in this network. They must not filter what passes the bridge.
    run(["sysctl", "-qw", f"{filtered}=0"])
    for node in NODES:
        run(["ip", "netns", "add", node])
        run(["ip", "link", "add", f"to-{node}", "type", "veth", "peer", "name", "eth0", "netns", node])
        run(["ip", "link", "set", f"to-{node}", "master", "br0", "up"])
        in_node(node, "ip", "link", "set", "lo", "up")
        in_node(node, "ip", "address", "add", f"{address(node)}/24", "dev", "eth0")
        in_node(node, "ip", "link", "set", "eth0", "up")
        in_node(node, "ip", "route", "add", "default", "via", CONTROL)
        # NetworkPolicy also applies between two pods of one node, whose packets pass only a bridge.
        in_node(node, "sysctl", "-qw", "net.ipv4.ip_forward=1", f"{filtered}=1")
    for node in NODES:
        route = [f"10.244.{number(node)}.0/24", "via", address(node)]
        run(["ip", "route", "add", *route])
        for other in NODES:
            if other != node:
                in_node(other, "ip", "route", "add", *route)


# ---- the cluster -----------------------------------------------------------------------------------------------------


class Process:
    """A program of the cluster, in the network of a node or in that of this process."""

    def __init__(self, folder, name, words, node=None):
        self.name, self.log = name, folder / "logs" / f"{name}.log"
        enter = ["nsenter", f"--net=/run/netns/{node}", "--"] if node else []
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*enter, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())

    def output_text(self):
        return self.log.read_text(errors="replace")

    def alive(self):
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.output_text()[-3000:]}"


# The kernel settings that a kubelet wants. Namespaces do not isolate them: a change would be one of the
# whole machine.
KERNEL = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
          "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000}


class Cluster:
    """Runs in namespaces of its own: see engine.in_namespaces. All its processes end with them."""

    def __init__(self, folder):
        assert os.getpid() == 1, "a cluster is started in namespaces of its own only: see engine.in_namespaces"
        self.dir, self.processes = folder, []
        self.bin, self.pki, self.disks = folder / "bin", folder / "pki", folder / "disks"
        for made in [self.bin, self.pki, self.disks, folder / "logs", folder / "etcd"]:
            made.mkdir()
        for part in PARTS:
            (self.bin / part).symlink_to(built("kubernetes", KUBERNETES_VERSION))
        (self.bin / "kube-router").symlink_to(built("kube-router", ROUTER_VERSION))
        # Kubelets and network plugins keep files in these folders, whatever their settings are.
        for hidden in ["/var/lib", "/var/log"]:
            run(["mount", "-t", "tmpfs", "tmpfs", hidden])
        # A kubelet changes a setting whose value it does not want. It reads these files instead of the
        # settings of the machine, finds the values that it wants, and changes nothing.
        for setting, value in KERNEL.items():
            file = folder / setting.replace("/", "-")
            file.write_text(f"{value}\n")
            run(["mount", "--bind", file, f"/proc/sys/{setting}"])
        # The images that the nodes unpack are in memory, about 3 GiB. Volumes are on the disk.
        (folder / "nodes").mkdir()
        run(["mount", "-t", "tmpfs", "-o", "size=6g", "tmpfs", folder / "nodes"])
        run(["mount", "--make-rshared", folder / "nodes"])
        make_networks()
        self.certificates()
        self.variables = {**environment(), "KUBECONFIG": str(self.config("admin")), "HOME": str(folder),
                          "PATH": f"{self.bin}:{environment()['PATH']}"}
        self.control_plane()
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.node, NODES))

    # ---- starting ----

    def start(self, name, words, node=None):
        process = Process(self.dir, name, words, node)
        self.processes.append(process)
        return process

    def certificates(self):
        """An authority, the API server's certificate, and a token for each user of the API."""
        def openssl(*words):
            run(["openssl", *words], cwd=self.pki)

        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kube-apiserver", "-keyout", "api.key", "-out", "api.csr")
        names = f"IP:10.96.0.1,IP:{CONTROL},IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"
        (self.pki / "names").write_text(f"subjectAltName={names}\n")
        openssl("x509", "-req", "-in", "api.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-out", "api.crt",
                "-extfile", "names")
        openssl("genrsa", "-out", "accounts.key", "2048")
        groups = {"admin": "system:masters", "router": "system:masters", **{node: "system:nodes" for node in NODES}}
        users = {"controllers": "system:kube-controller-manager", "scheduler": "system:kube-scheduler", "proxy": "system:kube-proxy",
                 **{node: f"system:node:{node}" for node in NODES}}
        names = ["admin", "controllers", "scheduler", "proxy", "router", *NODES]
        lines = [f'{name},{users.get(name, name)},{name},"{groups.get(name, "")}"' for name in names]
        (self.pki / "tokens").write_text("\n".join(lines) + "\n")
        server = {"server": f"https://{CONTROL}:6443", "certificate-authority": f"{self.pki}/ca.crt"}
        for name in names:
            self.config(name).write_text(json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "test",
                "clusters": [{"name": "test", "cluster": server}],
                "users": [{"name": name, "user": {"token": name}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            }))

    def config(self, user):
        return self.pki / f"{user}.conf"

    def control_plane(self):
        store = "http://127.0.0.1:2379"
        # etcd does not wait for the disk (--unsafe-no-fsync), because the masters wait for the same disk.
        self.start("etcd", ["etcd", "--data-dir", self.dir / "etcd", "--unsafe-no-fsync", "--listen-client-urls", store,
                            "--advertise-client-urls", store, "--listen-peer-urls", "http://127.0.0.1:2380"])
        pki, key = self.pki, self.pki / "accounts.key"
        self.start("kube-apiserver", [
            self.bin / "kube-apiserver", "--etcd-servers", store, "--advertise-address", CONTROL, "--cert-dir", pki,
            "--tls-cert-file", pki / "api.crt", "--tls-private-key-file", pki / "api.key", "--client-ca-file", pki / "ca.crt",
            "--token-auth-file", pki / "tokens", "--authorization-mode", "Node,RBAC", "--service-cluster-ip-range", SERVICES,
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key,
            "--service-account-signing-key-file", key, "--kubelet-preferred-address-types", "InternalIP",
            "--kubelet-client-certificate", pki / "api.crt", "--kubelet-client-key", pki / "api.key"])
        until("the API server is ready", lambda: succeeds([*self.words(), "get", "--raw", "/readyz"], 10), 120, self.processes)

        def as_user(user):
            files = ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"]
            return [*[word for file in files for word in (file, self.config(user))], "--leader-elect=false"]

        self.start("kube-controller-manager", [
            self.bin / "kube-controller-manager", *as_user("controllers"), "--use-service-account-credentials",
            "--service-account-private-key-file", key, "--root-ca-file", pki / "ca.crt",
            "--flex-volume-plugin-dir", self.dir / "plugins"])
        self.start("kube-scheduler", [self.bin / "kube-scheduler", *as_user("scheduler")])

    def node(self, node):
        folder, socket = self.dir / "nodes" / node, f"/run/{node}.sock"
        for made in [folder, folder / "cni", folder / "kubelet"]:
            made.mkdir()
        cgroup = make_cgroup(node)
        (folder / "cni/10-pods.conflist").write_text(json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [{
            "type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": f"10.244.{number(node)}.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}],
                     "dataDir": str(folder / "addresses")}}]}))
        # Without restrict_oom_score_adj, runc lowers the out-of-memory score of some processes. That
        # needs a capability that this machine may lack, if it is a container.
        (folder / "containerd.toml").write_text(f"""version = 2
root = "{folder}/containerd"
state = "/run/{node}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{folder}/cni"
""")
        (folder / "resolv.conf").write_text(f"nameserver {CONTROL}\n")
        (folder / "kubelet.yaml").write_text(json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration", "address": address(node),
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True},
                               "x509": {"clientCAFile": f"{self.pki}/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"}, "cgroupDriver": "cgroupfs", "cgroupRoot": cgroup, "failCgroupV1": False,
            "failSwapOn": False, "clusterDNS": [NAMES], "clusterDomain": "cluster.local", "containerRuntimeEndpoint": f"unix://{socket}",
            "resolvConf": f"{folder}/resolv.conf", "volumePluginDir": f"{folder}/plugins", "podLogsDir": f"{folder}/podlogs",
            # All nodes share this machine's disk, so none of them can free it.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"}}))
        (folder / "proxy.yaml").write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables", "clusterCIDR": PODS,
            "clientConnection": {"kubeconfig": str(self.config("proxy"))}, "hostnameOverride": node,
            # Zero leaves the kernel's settings, which only the first network namespace may change.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}}))
        runtime = self.start(f"{node}-containerd", ["containerd", "--config", folder / "containerd.toml"], node)
        until(f"containerd of {node} listens", lambda: Path(socket).exists(), 30, [runtime])
        images = self.dir / "images.tar"
        until(f"containerd of {node} answers", lambda: succeeds(["ctr", "--address", socket, "version"]), 30, [runtime])
        run(["ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", images], 300)
        kubelet = self.start(f"{node}-kubelet", [
            self.bin / "kubelet", "--config", folder / "kubelet.yaml", "--kubeconfig", self.config(node), "--root-dir", folder / "kubelet",
            "--hostname-override", node, "--node-ip", address(node), "--cert-dir", folder / "pki",
            "--node-labels", f"topology.kubernetes.io/zone={zone(node)}"], node)
        self.start(f"{node}-proxy", [self.bin / "kube-proxy", "--config", folder / "proxy.yaml"], node)
        # kube-router ends if it does not find its node.
        until(f"{node} is registered", lambda: succeeds([*self.words(), "get", "node", node], 10), 60, [kubelet])
        self.start(f"{node}-router", [
            self.bin / "kube-router", "--run-router=false", "--run-service-proxy=false", "--run-firewall=true", "--kubeconfig",
            self.config("router"), "--hostname-override", node, "--service-cluster-ip-range", SERVICES], node)

    def ready(self):
        """Waits for the nodes, and makes what a cluster has besides k8s/."""
        self.kubectl("apply", "--filename", HERE / "cluster.yaml")
        self.renew_disks()
        self.kubectl("wait", "--for=create", *[f"node/{node}" for node in NODES], "--timeout=60s", limit=70)
        self.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s", limit=70)
        self.kubectl("--namespace", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=90s", limit=100)
        for namespace, pod in [("clients", "client"), ("strangers", "stranger")]:
            self.kubectl("--namespace", namespace, "wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=60s", limit=70)

    # ---- using ----

    def words(self):
        return [self.bin / "kubectl", "--kubeconfig", self.config("admin")]

    def kubectl(self, *words, limit=60, **options):
        return run([*self.words(), *words], limit, env=self.variables, **options)

    def get(self, *words):
        return json.loads(self.kubectl("get", *words, "--output", "json"))

    def network(self, namespace, pod):
        """The network of a pod."""
        found = self.get("--namespace", namespace, "pod", pod)
        node, uid = found["spec"]["nodeName"], found["metadata"]["uid"]
        for top in engine.cgroups(os.environ["ENGINE_CGROUP"]):
            for processes in top.glob(f"{node}/kubepods/**/pod{uid}/*/cgroup.procs"):
                for pid in processes.read_text().split():
                    return Network(pid)
        raise AssertionError(f"{namespace}/{pod} has no process on {node}")

    def cut_off(self, node, is_cut=True):
        run(["ip", "link", "set", f"to-{node}", "down" if is_cut else "up"])

    def disk(self, claim):
        """The folder of a volume, and its node."""
        volume = self.get("--namespace", "redlock", "persistentvolumeclaim", claim)["spec"]["volumeName"]
        spec = self.get("persistentvolume", volume)["spec"]
        return Path(spec["local"]["path"]), Path(spec["local"]["path"]).parent.name

    def renew_disks(self):
        """Makes volumes with empty folders, after the claims on the old volumes have been deleted."""
        self.kubectl("delete", "persistentvolume", "--all", "--wait=true", limit=60)
        shutil.rmtree(self.disks)
        volumes = []
        for node in NODES:
            for disk in range(1, DISKS_PER_NODE + 1):
                (self.disks / node / str(disk)).mkdir(parents=True)
                on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
                volumes.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{node}-{disk}"}, "spec": {
                    "capacity": {"storage": "4Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "standard",
                    "local": {"path": f"{self.disks}/{node}/{disk}"},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}}}})
        (self.dir / "volumes.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": volumes}))
        self.kubectl("apply", "--filename", self.dir / "volumes.json")

    def alive(self):
        for process in self.processes:
            process.alive()


def make_cgroup(node):
    """A cgroup for the pods of a node. Kubelets that shared one would end the pods of each other as orphans. Returns its name."""
    name = f"{os.environ['ENGINE_CGROUP']}/{node}"
    for folder in engine.cgroups(name):
        for made in [folder.parent, folder]:
            made.mkdir(exist_ok=True)
            # With cgroup v1, a new group of cpuset has no processors and no memory.
            for file in ["cpuset.cpus", "cpuset.mems"] if (made / "cpuset.cpu_exclusive").exists() else []:
                (made / file).write_text((made.parent / file).read_text())
            delegate(made)
    return f"/{name}"


def delegate(cgroup):
    """With cgroup v2, lets the groups below use all controllers."""
    if (cgroup / "cgroup.subtree_control").exists():
        for controller in (cgroup / "cgroup.controllers").read_text().split():
            (cgroup / "cgroup.subtree_control").write_text(f"+{controller}")

"""Tools that are built from their sources, with Go. Used by `tests/deploy/check` and `tests/deploy/kubernetes`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
# Updated by hand.
TOOLS = {"kustomize": "sigs.k8s.io/kustomize/kustomize/v5@v5.7.1", "helm": "helm.sh/helm/v3/cmd/helm@v3.19.0"}


class Skipped(Exception):
    """This machine lacks what the message names."""


def tool(name):
    """The path of a tool. It is built from its source if it is missing; no binary is ever downloaded."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", HOME / "target")) / "tools" / TOOLS[name].rpartition("@")[2]
    if not (folder / name).exists():
        if not shutil.which("go"):
            raise Skipped(f"Go, to build {name}")
        print(f"tests/deploy/{Path(sys.argv[0]).name}: building {TOOLS[name]}", file=sys.stderr)
        environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-trimpath"}
        done = subprocess.run(["go", "install", TOOLS[name]], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"a build of {name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return folder / name

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
            raise Skipped(f"no Go here to build {name} with")
        print(f"tests/deploy/{Path(sys.argv[0]).name}: building {TOOLS[name]}", file=sys.stderr)
        environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-trimpath"}
        subprocess.run(["go", "install", TOOLS[name]], check=True, env=environment, capture_output=True)
    return folder / name

"""The project's images, built from programs that exist already. Used by `tests/deploy/compose` and
`tests/deploy/kubernetes`.

The programs come from target/: from release/ if those are the newest, otherwise from debug/. All other
steps are those of the Dockerfile.
"""

import os
import re
from pathlib import Path

from engine import run

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
DOCKERFILE = "crates/redlock-gateway/Dockerfile"


def redis_image():
    return re.search(r"(?m)^ARG REDIS_IMAGE=(\S+)$", (ROOT / DOCKERFILE).read_text())[1]


def programs():
    """The folder in target/ with the newest gateway."""
    built = [TARGET / profile for profile in ("release", "debug")
             if (TARGET / profile / "redlock-gateway").exists() and (TARGET / profile / "libredlock_module.so").exists()]
    assert built, f"{TARGET} has no programs: run cargo build first"
    return max(built, key=lambda folder: (folder / "redlock-gateway").stat().st_mtime)


def collect(programs_folder, out):
    """Runs the commands of the Dockerfile's first stage, except the builds. Returns the Dockerfile with a first stage that
    takes what they made from the folder crates/built."""
    dockerfile = (ROOT / DOCKERFILE).read_text()
    stage = re.search(r"(?ms)^FROM \S+ AS build\n.*?(?=^FROM )", dockerfile)[0]
    step = re.search(r"(?ms)^RUN (.*?[^\\])$", stage)[1].replace("\\\n", " ")
    commands = [command.strip() for command in re.sub(r"--mount=\S+", "", step).split("&&")]
    kept = [command for command in commands if not command.startswith("cargo build")]
    assert len(kept) == len(commands) - 2, f"the first stage has other builds than this test knows: {commands}"
    for command in kept:
        run(["bash", "-euc", command.replace("target/release/", f"{programs_folder}/").replace("/out/", f"{out}/")], 120, cwd=ROOT)
    return dockerfile.replace(stage, "FROM scratch AS build\nCOPY crates/built /\n\n")

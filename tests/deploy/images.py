"""The project's images, built from programs that exist already. Used by `tests/deploy/compose` and
`tests/deploy/kubernetes`.

The programs come from target/: from release/ if those are the newest, otherwise from debug/. All other
steps are those of the Dockerfile.
"""

import os
import re
from pathlib import Path

from engine import LeftOut, run

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
DOCKERFILE = "crates/redlock-gateway/Dockerfile"
# The C library of Debian 12, on which the masters' image is based, is glibc 2.36.
NEWEST_GLIBC = 36


def redis_image():
    return re.search(r"(?m)^ARG REDIS_IMAGE=(\S+)$", (ROOT / DOCKERFILE).read_text())[1]


def newest():
    """The folder in target/ with the newest gateway. None if nothing has been built."""
    built = [TARGET / profile for profile in ("release", "debug")
             if (TARGET / profile / "redlock-gateway").exists() and (TARGET / profile / "libredlock_module.so").exists()]
    return max(built, key=lambda folder: (folder / "redlock-gateway").stat().st_mtime, default=None)


def programs():
    assert newest(), f"{TARGET} has no programs: run tests/build first"
    return newest()


def check_module():
    """Leaves the test out if Redis in the masters' image could not load the module."""
    module = newest() and newest() / "libredlock_module.so"
    wanted = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", module.read_bytes())), default=0) if module else 0
    if wanted > NEWEST_GLIBC:
        raise LeftOut(f"a module for Debian 12: {module} needs glibc 2.{wanted}, newer than 2.{NEWEST_GLIBC}; "
                      "build it as the job kubernetes in .github/workflows/ci.yml does")


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

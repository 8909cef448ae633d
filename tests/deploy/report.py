"""What a test prints, with the time since its start. Used by `tests/deploy/compose` and `tests/deploy/kubernetes`."""

import sys
import time
from pathlib import Path

BEGAN = time.monotonic()


def elapsed():
    """The seconds since the start of the test."""
    return time.monotonic() - BEGAN


def say(word, what):
    print(f"{word} [{elapsed():5.1f} s] {what}", flush=True)


def ok(what):
    say("ok  ", what)


def progress(what):
    print(f"tests/deploy/{Path(sys.argv[0]).name}: {what}", file=sys.stderr, flush=True)

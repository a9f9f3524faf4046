"""Processes that get kernels from a cache, as a first launch does, and mounts for the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from flashskip._jit.entry import read_entry

ROOT = Path(__file__).resolve().parent.parent

# Gets `kernels` kernels from the cache that the environment names and prints their hashes. Number n
# carries n times `padding` bytes of data.
FETCH = """
import hashlib, logging, os, sys, time
sys.path.insert(0, {root!r})
from flashskip import _env
from flashskip._jit import compile, kernel
from flashskip._jit.render import Source
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
cache = _env.kernel_cache()
{before}
for n in range({kernels}):
    text = '__device__ unsigned char data[%d] = {{1}};' % (n * {padding} + 1)
    text += 'extern "C" __global__ void k%d(int* p) {{ *p = %d + data[*p]; }}' % (n, n)
    program = compile.Program("k%d" % n, Source(text + chr(10)), block=32)
    cubin = kernel.fetch(program, cache).cubin
    assert cubin[:4] == bytes([127]) + b"ELF"
    sys.stdout.write(hashlib.sha256(cubin).hexdigest() + chr(10))  # whole, whoever else writes
"""

# Says "ready" and waits for a file, so that several processes begin at once.
BARRIER = """
print("ready", flush=True)
while not os.path.exists({file!r}): time.sleep(0.001)
"""


def command(
    root: Path = ROOT, kernels: int = 1, padding: int = 0, before: str = "", python: str = ""
) -> list[str]:
    """The command line of a process; `before` is code that it runs first."""
    code = FETCH.format(root=str(root), kernels=kernels, padding=padding, before=before)
    return [python or sys.executable, "-c", code]


def environment(**changed: str | None) -> dict[str, str]:
    """The environment without a cache of its own, and with changes; None removes a variable."""
    given = {**os.environ, "XDG_CACHE_HOME": None, "FLASHSKIP_CACHE_SEED": None, **changed}
    return {name: value for name, value in given.items() if value is not None}


def launch(arguments: Sequence[str], **changed: str | None) -> subprocess.Popen[str]:
    """Start a process with these changes to the environment."""
    return subprocess.Popen(
        arguments, env=environment(**changed), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """Wait for a process that must go well; its words, and what it logged."""
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    return [word for word in out.split() if word != "ready"], log


def fetch(directory: Path, **options: object) -> tuple[list[str], str]:
    """Run one process on a cache directory."""
    return finish(launch(command(**options), FLASHSKIP_CACHE_DIR=str(directory)))  # type: ignore[arg-type]


def kernels_in(directory: Path) -> list[Path]:
    """All files, which must be sound entries."""
    files = sorted(directory.iterdir())
    for file in files:
        assert read_entry(file).payload[:4] == b"\x7fELF"
    return files


# ---- file systems of a test's own ----------------------------------------------------------------

# Mounts, then runs commands in turn, printing a line with the status of each.
MOUNTED = """
import subprocess, sys
for mount in {mounts!r}:
    subprocess.run(mount, check=True)
for command in {commands!r}:
    print("status", subprocess.run(command).returncode, flush=True)
"""


def _own_mounts() -> list[str]:
    return ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]


@cache
def _can_mount() -> bool:
    probe = [*_own_mounts(), "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def mounted(
    mounts: Sequence[Sequence[str]], commands: Sequence[Sequence[str]], **changed: str | None
) -> tuple[list[str], str]:
    """Run commands among mounts that no other process sees; the lines of both outputs."""
    if not _can_mount():
        pytest.skip("this user may not mount file systems (unshare --mount)")
    code = MOUNTED.format(mounts=[*map(list, mounts)], commands=[*map(list, commands)])
    process = launch([*_own_mounts(), sys.executable, "-c", code], **changed)
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert "Traceback" not in out + log, out + log
    return out.splitlines(), log

"""Many programs to a cache directory at once: ninja runs one worker process per missing kernel."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .compile import Program
from .entry import holds
from .error import FlashSkipError
from .kernel import key_of

_IMPORT_PATH = Path(__file__).resolve().parents[2]  # where the package lies


@dataclass(frozen=True)
class Outcome:
    """What `build` did, as symbols: there before, made now, not made."""

    present: tuple[str, ...]
    built: tuple[str, ...]
    failed: tuple[str, ...]


def build(programs: Sequence[Program], directory: Path, *, jobs: int) -> Outcome:
    """Compile those of `programs` that `directory` lacks, `jobs` at a time, with progress.

    An entry that is damaged counts as lacking. Interrupted, it goes on where it was when called
    again, since every finished kernel is in the directory.

    Raises
    ------
    FlashSkipError
        ninja is not installed.
    OSError
        The directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = [program for program in programs if not holds(directory, key_of(program))]
    if missing:
        # Not inside the directory: that one holds entries alone, and can be moved at any time.
        with tempfile.TemporaryDirectory(prefix="flashskip-warmup-") as work:
            _write_ninja(Path(work), missing, directory.resolve())
            _run_ninja(Path(work), jobs)
    failed = {program.symbol for program in missing if not holds(directory, key_of(program))}
    wanted = {program.symbol for program in missing}
    return Outcome(
        present=tuple(program.symbol for program in programs if program.symbol not in wanted),
        built=tuple(program.symbol for program in missing if program.symbol not in failed),
        failed=tuple(program.symbol for program in missing if program.symbol in failed),
    )


def _write_ninja(work: Path, programs: Sequence[Program], directory: Path) -> None:
    """Write one edge and one input file per program, named by plain hexadecimals."""
    command = f"{shlex.quote(sys.executable)} -m flashskip._jit.worker $in".replace("$", "$$")
    lines = [
        "rule compile",
        f"  command = {command.replace('$$in', '$in')}",
        "  description = $symbol",
    ]
    for program in programs:
        name = program.content[:32]
        job = {"directory": str(directory), "program": asdict(program)}
        (work / f"{name}.json").write_text(json.dumps(job), encoding="utf-8")
        lines += [f"build {name}.done: compile {name}.json", f"  symbol = {program.symbol}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run_ninja(work: Path, jobs: int) -> None:
    path = os.pathsep.join(filter(None, [str(_IMPORT_PATH), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "NINJA_STATUS": "[%f/%t, %es] "}
    command = [ninja_path(), "-C", str(work), "-k", "0", "-j", str(jobs)]
    sys.stdout.flush()
    subprocess.run(command, env=environment, check=False)  # the directory tells what failed


def ninja_path() -> str:
    """Find ninja: the one of its Python package, else the one on the path.

    Raises
    ------
    FlashSkipError
        There is none.
    """
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise FlashSkipError(
            "ninja is not installed, and warming up needs it; run: pip install ninja"
        )
    return found

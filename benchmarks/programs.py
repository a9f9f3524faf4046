"""Kernels as data: what the compiler sees and what a launch needs, to compare two checkouts.

`of_checkout` asks another checkout in a process of its own. This file is what runs there, as it
stands here: of flashskip `describe` uses only what older checkouts have too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashskip
from flashskip import _kernels
from flashskip._jit.compile import Program
from flashskip._jit.render import Source
from flashskip.variant import Variant

MULTIPROCESSORS = 132  # of an H100 or H200: what grids and scratch memory are stated for
# Scratch memory of a launch: what a plan reserves, so that no kernel may need more.
_MEMORY = ("workspace_bytes", "merge_counters")


def describe(symbol: str) -> dict[str, Any]:
    """Return the kernel of a variant in the flashskip that is imported, as JSON can hold it."""
    v = Variant.from_symbol(symbol)
    grid = MULTIPROCESSORS  # of every launch, before there were pairs
    if hasattr(_kernels, "grid_for"):
        grid = _kernels.grid_for(v, MULTIPROCESSORS)
    return {
        "program": dataclasses.asdict(_kernels.program_for(v)),
        "params": _kernels.params_for(v).c_struct,
        "grid": grid,
        "workspace_bytes": _kernels.workspace_bytes(v, grid),
        "merge_counters": _kernels.merged_units(v, grid) if v.op == "prefill" else grid,
    }


def of_checkout(sources: Path, symbols: Sequence[str]) -> dict[str, Any]:
    """Return what `describe` says in another checkout, by symbol.

    Raises
    ------
    RuntimeError
        It cannot say so: there is no flashskip, or it lacks a variant.
    """
    done = subprocess.run(
        [sys.executable, "-", *symbols],  # from stdin, so that the working directory comes first
        cwd=sources,
        input=Path(__file__).read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the checkout {sources} does not render: {done.stderr.strip()[-900:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def program_of(kernel: dict[str, Any]) -> Program:
    """Return the program of a description, which may have come from a file.

    Raises
    ------
    ValueError
        It has a field that this checkout's `Program` lacks, and so does not know how to launch.
    """
    fields = dict(kernel["program"])
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(Program)})
    if unknown:
        raise ValueError(f"its program has the fields {unknown}, which these sources do not know")
    source = fields.pop("source")
    headers = tuple((name, text) for name, text in source["headers"])
    options = tuple(fields.pop("options"))
    return Program(source=Source(source["text"], headers), options=options, **fields)


def misfit(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Say why a plan of our kernel must not launch theirs; "" if it may."""
    if theirs["params"] != ours["params"]:
        lines = difflib.ndiff(theirs["params"].splitlines(), ours["params"].splitlines())
        fields = [" ".join(x.split()) for x in lines if x[0] in "-+" and "static_assert" not in x]
        return f"its parameters are not those that the plan passes: {' '.join(fields[:8])}"
    for name in _MEMORY:
        if theirs[name] > ours[name]:
            return f"it needs {name}={theirs[name]}; the plan reserves {ours[name]}"
    # Among the parameters of a decode is how a grid divides over the KV heads.
    decodes = ours["program"]["symbol"].startswith("flashskip_decode")
    if decodes and theirs["grid"] != ours["grid"]:
        return f"its grid is {theirs['grid']}; the plan's parameters are for {ours['grid']}"
    return ""


if __name__ == "__main__":
    if not Path(flashskip.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        sys.exit(f"there is no flashskip; {flashskip.__file__} would be imported")
    print(json.dumps({symbol: describe(symbol) for symbol in sys.argv[1:]}))

"""The receipts of whole GPU runs: which sources passed, on what machine.

``python tests/receipt.py`` writes their figures into docs/reliability.md.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECEIPTS = {  # by the marker of the tests
    "gpu": RESULTS / "gpu_tests.json",
    "gpu_fuzz": RESULTS / "gpu_fuzz.json",
    "gpu_sanitize": RESULTS / "gpu_sanitize.json",
    "two_gpus": RESULTS / "two_gpus.json",
}

# What a GPU test depends on: everything that is compiled for the GPU or launches on it.
SOURCES = (
    "templates",
    "csrc",
    "flashskip/_buffers.py",
    "flashskip/_jit",
    "flashskip/_kernels.py",
    "flashskip/_maps.py",
    "flashskip/_op.py",
    "flashskip/_plan.py",
    "flashskip/_tiles.py",
    "flashskip/_wrapper.py",
    "flashskip/variant.py",
    "flashskip/prefill.py",
    "flashskip/decode.py",
)
PACKAGES = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "jinja2", "pytest")


def source_files() -> list[Path]:
    """Every file of SOURCES, in the order of its name."""
    files: list[Path] = []
    for name in SOURCES:
        path = ROOT / name
        found = path.rglob("*") if path.is_dir() else [path]
        files += [f for f in found if f.is_file() and "__pycache__" not in f.parts]
    return sorted(files)


def source_digest() -> str:
    """SHA-256 over names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files():
        for part in (path.relative_to(ROOT).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def write(marker: str, counts: dict[str, int], seconds: float, notes: dict[str, Any]) -> None:
    """Write the receipt of a run that just ended on this machine; `notes` are the tests' own."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    receipt = {
        "source_digest": source_digest(),
        "counts": counts,
        **notes,
        "seconds": round(seconds, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": _versions(),
    }
    RECEIPTS[marker].write_text(json.dumps(receipt, indent=2) + "\n")


def read(marker: str) -> dict[str, Any] | None:
    """The committed receipt, None where there is none."""
    path = RECEIPTS[marker]
    return json.loads(path.read_text()) if path.exists() else None


def _machine() -> dict[str, Any]:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": driver.split("\n")[0].strip(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


# ---- figures for the documentation ---------------------------------------------------------------

PAGE = ROOT / "docs" / "reliability.md"
_FIGURES = re.compile(r"(<!-- receipts: begin -->\n).*(<!-- receipts: end -->)", re.DOTALL)


def figures() -> str:
    """A table of all receipts, each with the command that makes it anew."""
    lines = ["| Command | Result | Machine, time |", "|---|---|---|"]
    present = source_digest()
    for marker in RECEIPTS:
        receipt = read(marker)
        command = f"`pytest -m {marker}`"
        if receipt is None:
            lines.append(f"| {command} | not run yet | |")
            continue
        older = "" if receipt["source_digest"] == present else ", of older sources"
        lines.append(f"| {command} | {_result(receipt)} | {_circumstances(receipt)}{older} |")
    return "\n".join(lines) + "\n"


def _result(receipt: dict[str, Any]) -> str:
    said = ", ".join(f"{n} {name}" for name, n in receipt["counts"].items() if n)
    if "examples" in receipt:
        decided = receipt["rows_decided"] / receipt["rows"]
        said += (
            f"; {receipt['examples']} random calls of {receipt['variants']} kernels, "
            f"{receipt['rows']:,} rows, {decided:.1%} of them decided by the reference"
        )
    for run, found in receipt.get("runs", {}).items():
        deliberate = f", {found['deliberate']} deliberate" if found["deliberate"] else ""
        said += f"; {run}: {found['findings']} findings{deliberate} in {found['launches']} launches"
    return said


def _circumstances(receipt: dict[str, Any]) -> str:
    machine, versions = receipt["machine"], receipt["versions"]
    gpus = machine.get("gpus", 1)
    return (
        f"{f'{gpus} x ' if gpus > 1 else ''}{machine['gpu']}, driver {machine['driver']}, "
        f"torch {versions['torch']}, NVRTC {versions['nvidia-cuda-nvrtc']}; "
        f"{receipt['seconds']:.0f} s on {receipt['date'][:10]}"
    )


def written(page: str) -> str:
    """The page with the figures of the present receipts between its two marks."""
    return _FIGURES.sub(lambda m: m[1] + figures() + m[2], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

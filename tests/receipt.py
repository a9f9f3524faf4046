"""The receipts of whole GPU runs: which sources passed, on what machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
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

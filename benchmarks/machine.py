"""Where and on what a result was measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from flashskip._jit.compile import nvrtc_version

_ROOT = Path(__file__).parent.parent
PEERS = ("flashinfer-python", "flash-attn-4", "vllm")
_SOURCES = ("flashskip", "templates", "csrc", "benchmarks")


def describe(device: torch.device, commit: str = "") -> dict[str, str]:
    """Return names and versions of all that a time depends on.

    `commit` names that of the sources where this copy of them has no git; the digest identifies
    them in any case.
    """
    about = {
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvrtc": nvrtc_version(),
        "cuda-bindings": _version("cuda-bindings"),
        "commit": commit or _output("git", "-C", str(_ROOT), "rev-parse", "HEAD"),
        "sources_sha256": source_digest(),
    }
    about |= {name: _version(name) for name in PEERS if _version(name) != "none"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "multiprocessors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _nvidia_smi("driver_version"),
            "power_limit": _nvidia_smi("power.limit"),
            "clocks": _nvidia_smi("clocks.max.sm,clocks.max.memory"),
        }
    return about


def commit_of(checkout: Path) -> str:
    """Return the commit of another checkout, "unknown" if the folder is not one."""
    found = _output("git", "-C", str(checkout), "rev-parse", "--show-prefix", "HEAD").split()
    return found[0] if len(found) == 1 else "unknown"  # two: a prefix, inside of some checkout


def source_digest() -> str:
    """Return a digest of every source that a result depends on, for copies without git."""
    digest = hashlib.sha256()
    for path in sorted(p for name in _SOURCES for p in (_ROOT / name).rglob("*")):
        if path.suffix in {".py", ".jinja", ".cuh", ".cu"}:
            digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _nvidia_smi(query: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").split("\n")[0]


def _output(*command: str) -> str:
    """Return what a program prints, "unknown" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()

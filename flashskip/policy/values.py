"""Values that may differ by phase, names of layers, devices: checked and looked up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from flashskip._checks import check_count
from flashskip._options import refusal
from flashskip.policy.formula import PHASES, check_number

PerPhase = float | Mapping[str, float | None] | None


def of_phase(value: PerPhase, phase: str) -> float | None:
    """Return a phase's value; None is dense."""
    return value.get(phase) if isinstance(value, Mapping) else value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Refuse what a file holds in the place of a mapping."""
    if not isinstance(value, Mapping):
        raise refusal(
            f"{name} is {value!r}",
            "a mapping",
            "Correct the checkpoint, or pass threshold instead",
        )
    return value


def plain(value: Any) -> Any:
    """Copy a mapping without its dense phases."""
    if isinstance(value, Mapping):
        return {phase: x for phase, x in value.items() if x is not None}
    return value


def check_phases(name: str, mapping: Mapping[str, Any]) -> None:
    """Refuse keys that are no phase."""
    for key in mapping:
        if key not in PHASES:
            raise refusal(
                f"{name} has the key {key!r}",
                "'prefill' and 'decode'",
                "Correct the key",
            )


def checked_per_phase(name: str, value: PerPhase, most: float) -> PerPhase:
    """Check a scalar or each phase's value, and copy a mapping."""
    if value is None:
        return None
    # A target of 1 would be to skip everything, which no threshold does.
    limits = {"below": most} if name == "target_sparsity" else {"most": most}
    if not isinstance(value, Mapping):
        return check_number(name, value, least=0.0, **limits)
    check_phases(name, value)
    return {
        phase: None if x is None else check_number(f"{name}[{phase!r}]", x, least=0.0, **limits)
        for phase, x in value.items()
    }


def checked_names(name: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple of strings; one string would be a sequence of letters."""
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_sequence or not all(isinstance(x, str) for x in given):
        raise TypeError(f"{name} is {given!r}; expected a sequence of strings. Pass a list.")
    return tuple(given)


def matches(layer: str, component: str | None, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a layer or a parent of it, with or without its component."""
    names = {layer}
    if component is not None:
        names |= {layer.removeprefix(f"{component}."), f"{component}.{layer}"}
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        for name in names
        for pattern in patterns
    )


def check_is(expected: type, **given: object) -> None:
    """Raise unless each is None or of the type."""
    for name, value in given.items():
        if value is not None and not isinstance(value, expected):
            raise TypeError(
                f"{name} is {value!r}; expected {expected.__name__} or None. Pass one of these."
            )


def check_size(name: str, value: object) -> None:
    """Raise unless this is None or a size of a tensor, which torch.compile may not know yet."""
    if value is not None and not isinstance(value, torch.SymInt):
        check_count(name, value, least=0)


def check_source(source: object) -> None:
    """Raise unless this is a mapping, or names a file."""
    if not isinstance(source, (Mapping, str, os.PathLike)):
        raise TypeError(
            f"source is {source!r}; expected a mapping, a str or an os.PathLike. Pass one of these."
        )


def load_mapping(path: Path) -> dict[str, Any]:
    """Parse a JSON file, or a YAML file by its suffix, and name it where it is damaged."""
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8")
        loaded = _parse_yaml(path, text) if is_yaml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no whole {'YAML' if is_yaml else 'JSON'} file ({error}); expected one. "
            "Write or copy it again."
        ) from error
    if not isinstance(loaded, dict):
        raise refusal(
            f"{path} holds a {type(loaded).__name__}",
            "a mapping",
            "Correct the file",
        )
    return loaded


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{path} is YAML and PyYAML is not installed; expected it for such files. Install "
            "pyyaml, or pass the parsed mapping."
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _device(given: torch.device | str) -> torch.device:
    """Return the device, which must be here."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise refusal(
            f"device is {given!r}", "'cpu', 'cuda' or a torch.device", "Correct the name"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise refusal(
                f"device is {given!r}", f"one of {count} GPUs, or 'cpu'", "Correct the name"
            )
    return device


def plan_device(device: torch.device | str | None) -> torch.device:
    """Where a wrapper without further hints would plan."""
    if device is not None:
        chosen = _device(device)
        if chosen.type != "cuda" or chosen.index is not None:
            return chosen
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

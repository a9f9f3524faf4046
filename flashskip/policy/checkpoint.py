"""Calibration in a checkpoint's ``config.json``: key ``sparse_attention_config``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashskip._options import refusal
from flashskip.policy.formula import Coefficients
from flashskip.policy.stored import read_coefficients, write_coefficients
from flashskip.policy.values import checked_names, load_mapping, mapping, plain

if TYPE_CHECKING:
    from flashskip.policy.config import SkipSoftmaxConfig

Source = Mapping[str, Any] | str | os.PathLike[str]

KEY = "sparse_attention_config"
_ALGORITHMS = ("skip_softmax", "softmax_skip")
_GROUP_KEYS = {
    "algorithm",
    "sparse_algo",
    "targets",
    "ignore",
    "disabled_layers",
    "threshold_scale_factor",
    "target_sparsity",
    "initial_disabled_steps",
    "disabled_until_timestep",
}


def read(source: Source, *, gate_given: bool) -> dict[str | None, dict[str, Any] | None]:
    """Return the fields of each component's configuration, None without a calibration.

    The key None stands for a model that is no pipeline.
    """
    if isinstance(source, Mapping):
        return {None: _read_config(source, gate_given)}
    path = Path(source)
    if path.is_file() or (path / "config.json").is_file():
        return {None: _read_config(_load(path), gate_given)}
    parts = _pipeline_parts(path)
    if not parts:
        raise refusal(
            f"{path} holds no config.json, nor do its folders with a {KEY}",
            "a model folder or a diffusion pipeline with calibrated parts",
            "Correct the path, or pass threshold instead of a calibration",
        )
    return {
        name: None if config is None else _read_config(config, gate_given, diffusion=True)
        for name, config in parts.items()
    }


def _pipeline_parts(folder: Path) -> dict[str, Mapping[str, Any] | None]:
    """Return the calibrated parts of a pipeline, and None for transformers without calibration."""
    parts: dict[str, Mapping[str, Any] | None] = {}
    for file in sorted(folder.glob("*/config.json")):
        try:
            config = _load(file)
        except (OSError, ValueError):  # damaged: that part is dense, which the caller warns of
            config = {}
        if KEY in config or file.parent.name.startswith(("transformer", "unet")):
            parts[file.parent.name] = config if KEY in config else None
    return parts if any(part is not None for part in parts.values()) else {}


def _read_config(
    config: Mapping[str, Any], gate_given: bool, diffusion: bool = False
) -> dict[str, Any]:
    """Return the fields of one component's configuration."""
    known = (KEY, "config_groups", "threshold_scale_factor")
    if not any(key in config for key in known):
        raise refusal(
            f"the checkpoint's config has no {KEY}",
            "a calibrated checkpoint",
            "Run `flashskip calibrate`, or pass threshold or threshold_scale_factor",
        )
    sparse = mapping(KEY, config.get(KEY, config))
    group = _skip_softmax_group(sparse)
    formula = group.get("threshold_scale_factor", sparse.get("threshold_scale_factor"))
    own = mapping("flashskip", sparse.get("flashskip", {}))
    coefficients = read_coefficients(formula, own)
    diffusion |= "_class_name" in config or "_diffusers_version" in config
    diffusion |= isinstance(coefficients, Coefficients)
    gated = gate_given or group.get("disabled_until_timestep") is not None
    if "initial_disabled_steps" in group and not gated:
        raise refusal(
            f"initial_disabled_steps is {group['initial_disabled_steps']} without "
            "disabled_until_timestep: how far a number of steps goes depends on the schedule",
            "disabled_until_timestep",
            "Pass user=SkipSoftmaxConfig(disabled_until_timestep=...), 1.0 for no gate",
        )
    return {
        "target_sparsity": group.get("target_sparsity", sparse.get("target_sparsity")),
        "coefficients": coefficients,
        "overflow": own.get("overflow", "clamp" if diffusion else None),
        "disabled_until_timestep": group.get("disabled_until_timestep"),
        "ignore": _strings(group, "ignore") + _strings(group, "disabled_layers"),
        "targets": _strings(group, "targets"),
        "order": own.get("order"),
    }


def _skip_softmax_group(sparse: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one group that is ours; without groups, the configuration itself."""
    if "config_groups" not in sparse:
        beside = ("producer", "flashskip")
        groups: list[Mapping[str, Any]] = [{k: v for k, v in sparse.items() if k not in beside}]
    else:
        given = mapping("config_groups", sparse["config_groups"])
        groups = [mapping(f"config_groups[{name!r}]", group) for name, group in given.items()]
        groups = [group for group in groups if _algorithm(group) in _ALGORITHMS]
    if len(groups) != 1:
        raise refusal(
            f"config_groups has {len(groups)} groups with algorithm skip_softmax",
            "one",
            "Correct the checkpoint, or pass threshold instead",
        )
    unknown = sorted(set(groups[0]) - _GROUP_KEYS)
    if bool(unknown):
        raise refusal(
            f"the skip_softmax group has the key {', '.join(map(repr, unknown))}",
            f"only {', '.join(sorted(_GROUP_KEYS))}",
            "Remove it, or pass threshold instead of the checkpoint's calibration",
        )
    return groups[0]


def _strings(group: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = group.get(key)
    return () if value is None else checked_names(key, value)


def _algorithm(group: Mapping[str, Any]) -> object:
    return group.get("algorithm", group.get("sparse_algo"))


def write(config: SkipSoftmaxConfig) -> dict[str, Any]:
    """Return the value of ``sparse_attention_config``."""
    from flashskip import __version__

    coefficients = config.coefficients
    if coefficients is None or config.components != {}:
        raise refusal(
            "the configuration has no coefficients of its own",
            "calibrated coefficients: the only thing that a checkpoint stores",
            "Calibrate, write components with write_checkpoint(), or use to_tensorrt_llm()",
        )
    assert coefficients is not None
    for name in ("threshold", "threshold_scale_factor"):
        if getattr(config, name) is not None:
            raise refusal(
                f"{name} is given, which a checkpoint has no key for",
                "target_sparsity",
                "Drop it, or use to_tensorrt_llm() or to_vllm_omni()",
            )
    formula, own = write_coefficients(coefficients)
    group: dict[str, Any] = {"algorithm": "skip_softmax", "threshold_scale_factor": formula}
    for name in ("targets", "ignore", "target_sparsity", "disabled_until_timestep"):
        value = getattr(config, name)
        if value not in (None, ()):
            group[name] = list(value) if isinstance(value, tuple) else plain(value)
    own.update({n: getattr(config, n) for n in ("overflow", "order") if getattr(config, n)})
    return {
        "config_groups": {"group_0": group},
        "producer": {"name": "flashskip", "version": __version__},
        "flashskip": own,
    }


def write_file(config: SkipSoftmaxConfig, path: str | os.PathLike[str]) -> None:
    """Replace our part of a ``config.json``; groups of other algorithms stay."""
    file = Path(path)
    if not file.is_file():
        file = file / "config.json"
    old = _load(file)
    new = write(config)
    groups = dict(mapping(KEY, old.get(KEY, {})).get("config_groups", {}))
    place = next((name for name, g in groups.items() if _algorithm(g) in _ALGORITHMS), None)
    if place is None:
        place = next(f"group_{i}" for i in range(len(groups) + 1) if f"group_{i}" not in groups)
    groups[place] = new["config_groups"]["group_0"]
    new["config_groups"] = groups
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**old, KEY: new}, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def _load(path: Path) -> dict[str, Any]:
    """Parse a ``config.json``, given as the file or as its folder."""
    return load_mapping(path / "config.json" if path.is_dir() else path)

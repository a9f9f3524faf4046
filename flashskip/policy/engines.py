"""Configuration of other engines: TensorRT-LLM's and vLLM-Omni's, to and from plain mappings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashskip._options import refusal
from flashskip.policy.values import check_source, load_mapping, plain

if TYPE_CHECKING:
    from flashskip.policy.config import SkipSoftmaxConfig

Source = Mapping[str, Any] | str | os.PathLike[str]

_TENSORRT_LLM_KEYS = {
    "algorithm",
    "threshold_scale_factor",
    "target_sparsity",
    "disabled_until_timestep",
}
_VLLM_OMNI_KEYS = {"threshold", "target_sparsity", "disabled_until_timestep"}


def read_tensorrt_llm(source: Source) -> dict[str, Any]:
    """Return the fields of a configuration from TensorRT-LLM's spelling."""
    spec = _load(source)
    spec = spec.get("attention_config", spec)  # VisualGen nests once more
    spec = spec.get("sparse_attention_config", spec)
    spec = {k: v for k, v in spec.items() if v is not None and v is not False}  # defaults
    if "algorithm" not in spec:
        raise refusal(
            f"sparse_attention_config has the keys {sorted(spec)}",
            "algorithm: skip_softmax among them",
            "Add it, or pass the part of the file that holds it",
        )
    if spec["algorithm"] != "skip_softmax":
        raise refusal(
            f"algorithm is {spec['algorithm']!r}",
            "'skip_softmax'",
            "Other sparse attention is not this library's",
        )
    _refuse_unknown("sparse_attention_config", spec, _TENSORRT_LLM_KEYS)
    fields = {key: value for key, value in spec.items() if key != "algorithm"}
    factor = fields.get("threshold_scale_factor")
    if isinstance(factor, Mapping):  # there, 0 is dense
        fields["threshold_scale_factor"] = {k: v for k, v in factor.items() if v != 0}
    elif factor == 0:
        fields["threshold_scale_factor"] = None
    return fields


def write_tensorrt_llm(config: SkipSoftmaxConfig) -> dict[str, Any]:
    """Return TensorRT-LLM's spelling; what it cannot say is refused."""
    advice = "Drop it, or use to_checkpoint(), which keeps it"
    _refuse_fields(config, "TensorRT-LLM", ("threshold", "order", "components"), advice)
    _refuse_ignore(config, "TensorRT-LLM")
    _refuse_dense_overflow(config, "TensorRT-LLM")
    spec: dict[str, Any] = {"algorithm": "skip_softmax"}
    for name in ("threshold_scale_factor", "target_sparsity", "disabled_until_timestep"):
        if getattr(config, name) is not None:
            spec[name] = plain(getattr(config, name))
    return spec


def read_vllm_omni(source: Source, role: str | None) -> dict[str, Any]:
    """Return the fields of a configuration from vLLM-Omni's spelling."""
    spec = _load(source)
    if "default" in spec or "per_role" in spec:
        roles = spec.get("per_role") or {}
        if role is not None and role not in roles and "default" not in spec:
            raise refusal(
                f"role is {role!r}",
                f"one of {sorted(roles)}, as there is no default",
                "Correct the role",
            )
        # An entry for a role replaces the whole default.
        spec = roles[role] if role in roles else spec.get("default") or {"skip_softmax": None}
    if "backend" in spec or "skip_softmax" in spec:
        spec = spec.get("skip_softmax") or {}
    _refuse_unknown("skip_softmax", spec, _VLLM_OMNI_KEYS)
    given = {key: spec.get(key) for key in _VLLM_OMNI_KEYS}
    if given["threshold"] is not None and given["target_sparsity"] is not None:
        raise refusal(
            "skip_softmax has threshold and target_sparsity",
            "one of them",
            "Drop one",
        )
    if given["disabled_until_timestep"] == 0:  # there, 0 is no gate
        given["disabled_until_timestep"] = None
    if given["target_sparsity"] is not None:
        given["overflow"] = "clamp"
    return given


def write_vllm_omni(config: SkipSoftmaxConfig) -> dict[str, Any]:
    """Return vLLM-Omni's spelling; what it cannot say is refused."""
    advice = "Drop it, or pass threshold or target_sparsity"
    names = ("threshold_scale_factor", "order", "components")
    _refuse_fields(config, "vLLM-Omni", names, advice)
    _refuse_ignore(config, "vLLM-Omni")
    _refuse_dense_overflow(config, "vLLM-Omni")
    spec: dict[str, Any] = {}
    for name in ("threshold", "target_sparsity"):
        value = getattr(config, name)
        if isinstance(value, Mapping):
            raise refusal(
                f"{name} is {value!r}, and vLLM-Omni knows no phases",
                "a number",
                f"Pass {name} as a number",
            )
        if value is not None:
            spec[name] = value
    gate = config.disabled_until_timestep
    if gate == 0.0:
        raise refusal(
            "disabled_until_timestep is 0.0, which means no gate to vLLM-Omni",
            "None or a value > 0",
            "Drop it, or close the gate with the smallest timestep of the schedule",
        )
    spec["disabled_until_timestep"] = 0.0 if gate is None else gate
    return spec


def _load(source: Source) -> Mapping[str, Any]:
    """Return a mapping: itself, or what a JSON or YAML file holds."""
    check_source(source)
    return source if isinstance(source, Mapping) else load_mapping(Path(source))


def _refuse_unknown(where: str, spec: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(spec) - known)
    if bool(unknown):
        raise refusal(
            f"{where} has the key {', '.join(map(repr, unknown))}",
            f"only {', '.join(sorted(known))}",
            "Remove it",
        )


def _refuse_fields(
    config: SkipSoftmaxConfig, engine: str, names: tuple[str, ...], advice: str
) -> None:
    for name in names:
        if bool(getattr(config, name)) or isinstance(getattr(config, name), float):
            raise refusal(
                f"{name} is given, which {engine} has no spelling for",
                f"a configuration without {name}",
                advice,
            )


def _refuse_ignore(config: SkipSoftmaxConfig, engine: str) -> None:
    """Refuse patterns that no checkpoint would carry to the engine."""
    if bool(config.ignore) and config.coefficients is None:
        raise refusal(
            f"ignore is given without coefficients, and {engine} reads it from a checkpoint only",
            "a configuration without ignore",
            "Drop it",
        )


def _refuse_dense_overflow(config: SkipSoftmaxConfig, engine: str) -> None:
    """Refuse what would skip nothing here and everything it can there."""
    if config.overflow == "dense":
        raise refusal(
            f"overflow is 'dense', which {engine} has no spelling for",
            "None or 'clamp'",
            "Drop it",
        )

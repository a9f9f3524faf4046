"""What a user says comes before what a checkpoint says."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashskip.policy import checkpoint as _checkpoint
from flashskip.policy.values import check_source

if TYPE_CHECKING:
    from flashskip.policy.config import SkipSoftmaxConfig

SOURCES = ("threshold", "threshold_scale_factor", "target_sparsity")


def has_source(config: SkipSoftmaxConfig) -> bool:
    """Whether a configuration says where its thresholds come from."""
    return any(getattr(config, name) is not None for name in SOURCES)


def over_checkpoint(
    user: SkipSoftmaxConfig,
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    gate_given: bool,
) -> SkipSoftmaxConfig:
    """Return the user's configuration above a checkpoint's; what is wrong names the file too."""
    check_source(source)
    try:
        return _over_components(user, source, gate_given)
    except (TypeError, ValueError) as error:
        if isinstance(source, Mapping) or os.fspath(source) in str(error):
            raise
        raise type(error)(f"{os.fspath(source)}: {error}") from error


def _over_components(
    user: SkipSoftmaxConfig,
    source: Mapping[str, Any] | str | os.PathLike[str],
    gate_given: bool,
) -> SkipSoftmaxConfig:
    """Return the user's configuration above a checkpoint's, for each of its components."""
    make = type(user)
    merged: dict[str | None, SkipSoftmaxConfig] = {}
    for name, fields in _checkpoint.read(source, gate_given=gate_given).items():
        own = user.components.get(name or "", user)
        if fields is not None:
            merged[name] = _over(own, make(**fields))
        elif own.threshold is not None or own.threshold_scale_factor is not None:
            merged[name] = own  # needs no calibration
        else:
            warnings.warn(f"{name} has no readable calibration: it is dense.", stacklevel=5)
            merged[name] = make()
    if None in merged:
        return merged[None]
    return make(components={str(name): part for name, part in merged.items()})


def _over(user: SkipSoftmaxConfig, checkpoint: SkipSoftmaxConfig) -> SkipSoftmaxConfig:
    """Put a user's configuration above one component's calibration."""
    first = user if has_source(user) else checkpoint
    gate = user.disabled_until_timestep
    return dataclasses.replace(
        user,
        **{name: getattr(first, name) for name in SOURCES},
        coefficients=user.coefficients or checkpoint.coefficients,
        overflow=user.overflow or checkpoint.overflow,
        disabled_until_timestep=checkpoint.disabled_until_timestep if gate is None else gate,
        ignore=tuple(dict.fromkeys([*checkpoint.ignore, *user.ignore])),
        targets=user.targets or checkpoint.targets,
        order=user.order or checkpoint.order,
        components={},
    )


def with_gate(config: SkipSoftmaxConfig, gate: float | None) -> SkipSoftmaxConfig:
    """Replace the gate, that of every component."""
    if config.components:
        parts = {name: with_gate(part, gate) for name, part in config.components.items()}
        return dataclasses.replace(config, components=parts)
    return dataclasses.replace(config, disabled_until_timestep=gate)

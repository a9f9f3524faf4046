"""How much attention may skip: one object for every way to say it."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashskip._options import OVERFLOWS, check_choice, refusal
from flashskip.geometry import ORDERS, Geometry
from flashskip.policy import checkpoint as _checkpoint
from flashskip.policy import engines as _engines
from flashskip.policy import precedence as _precedence
from flashskip.policy.formula import PHASES, Coefficients, check_number, describe, differs
from flashskip.policy.precedence import SOURCES
from flashskip.policy.progress import DenoiseProgress
from flashskip.policy.values import (
    PerPhase,
    check_is,
    check_phases,
    check_size,
    checked_names,
    checked_per_phase,
    matches,
    of_phase,
    plan_device,
)

Source = Mapping[str, Any] | str | os.PathLike[str]

_LIMITS = {"threshold": 1.0, "threshold_scale_factor": 3e38, "target_sparsity": 1.0}


@dataclass(frozen=True, kw_only=True)
class SkipSoftmaxConfig:
    """Where the thresholds of a model's attention come from.

    A value is a number for both phases, or a mapping ``{"prefill": x, "decode": y}`` in which a
    phase that is missing or None is dense. A phase takes its threshold from one source.

    Attributes
    ----------
    threshold : float or mapping, optional
        The final threshold, 0 to 1.
    threshold_scale_factor : float or mapping, optional
        F: the threshold of a request with L keys is F / L.
    target_sparsity : float or mapping, optional
        Share of tiles to skip, 0 to 1, through `coefficients`.
    coefficients : Coefficients or mapping, optional
        Calibrated curve, for any phase or per phase.
    overflow : {"dense", "clamp"}, optional
        What a threshold >= 1 that results from a factor means for its request. None: "dense", and
        "clamp" for what was read from a diffusion component.
    disabled_until_timestep : float, optional
        Dense while the normalized timestep of the sampler is above this; see
        `record_denoise_step`. None: no gate.
    ignore : sequence of str
        Layers kept dense: names, which stand for their children too, or `fnmatch` patterns.
    targets : sequence of str
        Module classes that a checkpoint names. Kept for export; which layers ask for options is
        the caller's choice.
    order : str, optional
        Visiting order of prefill; None is the kernels' default. Coefficients from other tools were
        measured in "ascending".
    components : mapping of str to SkipSoftmaxConfig
        Configurations of the parts of a diffusion pipeline, instead of everything above.

    Raises
    ------
    ValueError, TypeError
        A value is out of range, or two sources are given for a phase; the message names the key.

    Examples
    --------
    >>> import flashskip
    >>> config = flashskip.SkipSoftmaxConfig(threshold={"prefill": 0.01}, ignore=["layers.0"])
    >>> config.options("prefill", layer="layers.7.attn")
    {'skip_softmax_threshold': 0.01}
    >>> config.options("decode", layer="layers.7.attn")
    {}
    """

    threshold: PerPhase = None
    threshold_scale_factor: PerPhase = None
    target_sparsity: PerPhase = None
    coefficients: Coefficients | Mapping[str, Coefficients] | None = None
    overflow: str | None = None
    disabled_until_timestep: float | None = None
    ignore: Sequence[str] = ()
    targets: Sequence[str] = ()
    order: str | None = None
    components: Mapping[str, SkipSoftmaxConfig] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # noqa: D105
        for name in SOURCES:
            object.__setattr__(
                self, name, checked_per_phase(name, getattr(self, name), _LIMITS[name])
            )
        for name in ("ignore", "targets"):
            object.__setattr__(self, name, checked_names(name, getattr(self, name)))
        if isinstance(self.coefficients, Mapping):
            check_phases("coefficients", self.coefficients)
            object.__setattr__(self, "coefficients", dict(self.coefficients))
        if self.disabled_until_timestep is not None:
            check_number(
                "disabled_until_timestep", self.disabled_until_timestep, least=0.0, most=1.0
            )
        check_choice("overflow", self.overflow, (None, *OVERFLOWS))
        check_choice("order", self.order, (None, *ORDERS))
        for phase in PHASES:
            given = [n for n in SOURCES if of_phase(getattr(self, n), phase) is not None]
            if len(given) > 1:
                raise refusal(
                    f"{' and '.join(given)} are both given for {phase}",
                    "one source of the threshold for a phase",
                    "Drop one of them",
                )
        if (
            self.overflow is not None
            and self.threshold_scale_factor is None
            and self.target_sparsity is None
            and self.coefficients is None
        ):
            raise refusal(
                "overflow is given without a scale factor or a target, where it has no effect",
                "overflow only with threshold_scale_factor or target_sparsity",
                "Drop overflow",
            )
        is_mapping = isinstance(self.components, Mapping)
        if not is_mapping or not all(
            isinstance(part, SkipSoftmaxConfig) for part in self.components.values()
        ):
            raise TypeError(
                f"components is {self.components!r}; expected a mapping of names to "
                "SkipSoftmaxConfig. Pass a dict."
            )
        object.__setattr__(self, "components", dict(self.components))
        if self.components:
            self._check_components()

    # -- what a wrapper takes

    def options(
        self,
        phase: str,
        layer: str | None = None,
        component: str | None = None,
        *,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """Return the keywords of `plan()` for an attention layer.

        Ask for self-attention only: cross-attention stays dense by being planned without them.

        Parameters
        ----------
        phase : {"prefill", "decode"}
            The wrapper: `BatchPrefillWrapper` or `BatchDecodeWrapper`.
        layer : str, optional
            Name of the module; needed where `ignore` names layers.
        component : str, optional
            Part of a diffusion pipeline; needed where `components` are given. Names in `ignore` may
            begin with it.
        batch_size : int, optional
            Requests of the plan; needed by a gate.
        device : torch.device or str, optional
            Where the plan runs, for a gate. Default: the current GPU, or the CPU without one.

        Returns
        -------
        dict
            Empty: dense. With a gate the threshold is a live float32 tensor ``[batch_size]`` that
            `record_denoise_step` writes; calls with equal settings return the same tensor.

        Raises
        ------
        ValueError
            If a needed argument or coefficient is missing, or a target outside what was measured.
        """
        check_choice("phase", phase, PHASES)
        check_is(str, layer=layer, component=component)
        check_size("batch_size", batch_size)
        if self.components:
            part = self._component(component)
            return part.options(phase, layer, component, batch_size=batch_size, device=device)
        source = None if self._is_ignored(layer, component) else self._source(phase)
        if source is None:
            return {}
        name, value, rest = source
        if self.disabled_until_timestep is not None:
            if batch_size is None:
                raise refusal(
                    "batch_size is None with disabled_until_timestep, whose threshold is a tensor",
                    "the number of requests of the plan",
                    "Pass batch_size",
                )
            assert batch_size is not None
            value = DenoiseProgress.current().live(
                self.disabled_until_timestep, value, batch_size, plan_device(device)
            )
        options = {name: value, **rest}
        if phase == "prefill" and self.order is not None:
            options["order"] = self.order
        return options

    def check(
        self,
        phase: str,
        geometry: Geometry,
        *,
        kv_len: int | None = None,
        component: str | None = None,
    ) -> None:
        """Warn, once each, where a target is used outside of what its calibration measured.

        Parameters
        ----------
        phase : {"prefill", "decode"}
            The wrapper.
        geometry : Geometry
            ``wrapper.geometry`` after `plan()`.
        kv_len : int, optional
            Keys of a request, where the caller knows them on the host.
        component : str, optional
            Part of a diffusion pipeline.

        Raises
        ------
        ValueError, TypeError
            An argument is none of these.
        """
        check_choice("phase", phase, PHASES)
        check_is(str, component=component)
        if not isinstance(geometry, Geometry):
            raise TypeError(
                f"geometry is {geometry!r}; expected a Geometry. Pass wrapper.geometry."
            )
        check_size("kv_len", kv_len)
        if self.components:
            self._component(component).check(phase, geometry, kv_len=kv_len)
            return
        if of_phase(self.target_sparsity, phase) is None:
            return
        coefficients = self._coefficients(phase)
        measured, lengths = coefficients.measured_in, coefficients.length_range
        if measured is not None and differs(measured, geometry):
            self._warn(
                f"coefficients of {phase} were measured in ({describe(measured)}) and the plan "
                f"uses ({describe(geometry)}): the achieved sparsity will differ from the target. "
                "Calibrate again, or choose the measured order if that is the difference."
            )
        if kv_len is not None and lengths is not None and not lengths[0] <= kv_len <= lengths[1]:
            self._warn(
                f"coefficients of {phase} were measured on {lengths[0]} to {lengths[1]} keys and "
                "a request is outside: the target is extrapolated. Calibrate for such lengths."
            )

    # -- spellings

    @classmethod
    def from_checkpoint(
        cls, source: Source, *, user: SkipSoftmaxConfig | None = None
    ) -> SkipSoftmaxConfig:
        """Read the calibration in a checkpoint; what `user` gives comes first.

        Parameters
        ----------
        source : mapping, str or os.PathLike
            A parsed ``config.json``, its path, a model folder, or the folder of a diffusion
            pipeline, whose parts become `components`.
        user : SkipSoftmaxConfig, optional
            Its threshold, factor or target replaces the checkpoint's, as do its gate, overflow and
            order; its `ignore` adds to the checkpoint's.

        Raises
        ------
        ValueError
            An unknown key or formula, missing or contradicting coefficients, a value out of range.
        """
        check_is(SkipSoftmaxConfig, user=user)
        user = cls() if user is None else user
        return _precedence.over_checkpoint(
            user, source, gate_given=user.disabled_until_timestep is not None
        )

    def to_checkpoint(self) -> dict[str, Any]:
        """Return ``{"sparse_attention_config": ...}`` for a ``config.json``."""
        return {"sparse_attention_config": _checkpoint.write(self)}

    def write_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Put the calibration into a ``config.json``, keeping everything else in it.

        Parameters
        ----------
        path : str or os.PathLike
            The file, or a folder that holds it; with `components`, the pipeline's folder, where
            components without coefficients are left as they are.
        """
        if self.components:
            for name, part in self.components.items():
                if part.coefficients is not None:
                    _checkpoint.write_file(part, os.path.join(path, name))
        else:
            _checkpoint.write_file(self, path)

    @classmethod
    def from_tensorrt_llm(cls, source: Source) -> SkipSoftmaxConfig:
        """Read ``sparse_attention_config`` of TensorRT-LLM, from a mapping or a YAML file.

        Two things differ: a factor of 0 is read as dense, as there, and a timestep that equals
        `disabled_until_timestep` is sparse here.

        Raises
        ------
        ValueError
            An unknown key, another algorithm, or a factor together with a target.
        """
        return cls(**_engines.read_tensorrt_llm(source))

    def to_tensorrt_llm(self) -> dict[str, Any]:
        """Return ``{"sparse_attention_config": ...}`` for TensorRT-LLM."""
        return {"sparse_attention_config": _engines.write_tensorrt_llm(self)}

    @classmethod
    def from_vllm_omni(
        cls, source: Source, *, role: str | None = None, checkpoint: Source | None = None
    ) -> SkipSoftmaxConfig:
        """Read the ``skip_softmax`` object of vLLM-Omni's diffusion attention configuration.

        Parameters
        ----------
        source : mapping, str or os.PathLike
            The object, a specification that holds it, the whole configuration, or a JSON file.
        role : str, optional
            Which entry of ``per_role``; "default" if None.
        checkpoint : mapping, str or os.PathLike, optional
            Where coefficients and `ignore` come from. As in vLLM-Omni, its own target and gate
            are left aside.

        Raises
        ------
        ValueError
            An unknown key, threshold together with a target, a value out of range.
        """
        user = cls(**_engines.read_vllm_omni(source, role))
        if checkpoint is None or not _precedence.has_source(user):
            return user
        merged = _precedence.over_checkpoint(user, checkpoint, gate_given=True)
        return _precedence.with_gate(merged, user.disabled_until_timestep)

    def to_vllm_omni(self) -> dict[str, Any]:
        """Return ``{"skip_softmax": ...}`` for vLLM-Omni."""
        return {"skip_softmax": _engines.write_vllm_omni(self)}

    # -- inside

    def _source(self, phase: str) -> tuple[str, Any, dict[str, Any]] | None:
        """Return the plan's keyword, its value, and the keywords that go with it."""
        threshold = of_phase(self.threshold, phase)
        if threshold is not None:
            return "skip_softmax_threshold", threshold, {}
        factor, exponent = of_phase(self.threshold_scale_factor, phase), 1.0
        target = of_phase(self.target_sparsity, phase)
        if target is not None:
            coefficients = self._coefficients(phase)
            factor, exponent = coefficients.factor(target), coefficients.c
            self._warn_about_order(phase, coefficients)
        if factor is None:
            return None
        rest = {"length_exponent": exponent, "overflow": self.overflow or "dense"}
        return "skip_softmax_threshold_scale_factor", factor, rest

    def _coefficients(self, phase: str) -> Coefficients:
        found = self.coefficients
        if isinstance(found, Mapping):
            found = found.get(phase)
        if found is None:
            raise ValueError(
                f"target_sparsity is given for {phase} and there are no coefficients for it; "
                "expected a calibrated checkpoint. Read one with from_checkpoint(), run `flashskip "
                "calibrate`, or pass threshold or threshold_scale_factor instead."
            )
        return found

    def _warn_about_order(self, phase: str, coefficients: Coefficients) -> None:
        """Compare what is known before a plan; `check` compares everything."""
        measured, order = coefficients.measured_in, self.order or ORDERS[0]
        if measured is None:
            return
        if phase == "decode" and measured.judged_against != "seed":
            used, advice = "seeded", "Calibrate again."
        elif phase == "prefill" and measured.order != order:
            used = f"order {order}"
            advice = f"Set order={measured.order!r}, or calibrate again."
        else:
            return
        self._warn(
            f"coefficients of {phase} were measured in ({describe(measured)}) and are used "
            f"({used}), where the same factor skips more or less. {advice}"
        )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def _is_ignored(self, layer: str | None, component: str | None) -> bool:
        if not self.ignore:
            return False
        if layer is None:
            raise refusal(
                "layer is None and ignore names layers to keep dense",
                "the name of the layer",
                "Pass layer",
            )
        assert layer is not None
        return matches(layer, component, self.ignore)

    def _component(self, component: str | None) -> SkipSoftmaxConfig:
        if component is None or component not in self.components:
            raise ValueError(
                f"component is {component!r}; expected one of "
                f"{', '.join(map(repr, self.components))}. Name the part that the layer is in."
            )
        return self.components[component]

    def _check_components(self) -> None:
        for f in dataclasses.fields(self):
            if f.init and f.name != "components" and getattr(self, f.name) not in (None, ()):
                raise ValueError(
                    f"{f.name} is given together with components; expected it inside each. Move it "
                    "into the configuration of the components."
                )
        nested = [name for name, part in self.components.items() if part.components]
        if bool(nested):
            raise refusal(
                f"component {nested} has components",
                "one level",
                "Flatten them",
            )

"""The gate of diffusion steps: live thresholds that follow the scheduler's timestep."""

from __future__ import annotations

import warnings
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashskip._options import refusal
from flashskip.policy.formula import check_number

TOLERANCE = 1e-6  # both sides are float32: a timestep that equals the gate is sparse


class DenoiseProgress:
    """Where a diffusion sampler stands, and the live thresholds that depend on it.

    Progress is local to a context (`contextvars`): a thread has its own, and so has everything
    inside ``with DenoiseProgress():``, which keeps concurrent generations apart. Ask a gated
    `SkipSoftmaxConfig` for its options and record the steps in the same context.

    Attributes
    ----------
    step_idx : int or None
        As recorded last; for the reader only. The gate never looks at it.
    timestep : float, torch.Tensor or None
        Timestep recorded last, running from 1 (noise) to 0; None: none was published.

    Examples
    --------
    >>> import flashskip
    >>> config = flashskip.SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=0.9)
    >>> with flashskip.DenoiseProgress():
    ...     flashskip.record_denoise_step(0, timestep=950, num_train_timesteps=1000)
    ...     live = config.options("prefill", batch_size=2, device="cpu")["skip_softmax_threshold"]
    ...     before = live.tolist()
    ...     flashskip.record_denoise_step(1, timestep=900, num_train_timesteps=1000)
    >>> before, live.tolist()
    ([0.0, 0.0], [0.5, 0.5])
    """

    def __init__(self) -> None:
        self.step_idx: int | None = None
        self.timestep: float | Tensor | None = None
        # (gate, value, batch size, device) -> tensor: layers with the same settings share one.
        self._live: dict[tuple[float, float, int, torch.device], Tensor] = {}
        self._tokens: list[Token[DenoiseProgress]] = []
        self._warned = False

    @staticmethod
    def current() -> DenoiseProgress:
        """Return the progress of this context, made on first use."""
        progress = _current.get(None)
        if progress is None:
            progress = DenoiseProgress()
            _current.set(progress)
        return progress

    def __enter__(self) -> DenoiseProgress:  # noqa: D105
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:  # noqa: D105
        _current.reset(self._tokens.pop())

    def live(self, gate: float, value: float, batch_size: int, device: torch.device) -> Tensor:
        """Return the float32 ``[batch_size]`` tensor that is `value` from the gate on, else 0.

        Its address never changes. 0 is the skip kernel that skips nothing: dense.
        """
        key = (gate, value, batch_size, device)
        if key not in self._live:
            with torch.inference_mode(False):  # else it could not be written to outside of it
                self._live[key] = torch.zeros(batch_size, dtype=torch.float32, device=device)
            self._write(self._live[key], gate, value)
        if self.timestep is None:
            self._warn_unpublished()
        return self._live[key]

    def record(self, step_idx: int, timestep: float | Tensor | None) -> None:
        """Publish a timestep in [0, 1] and move the live thresholds."""
        self.step_idx, self.timestep = step_idx, timestep
        for (gate, value, _, _), live in self._live.items():
            self._write(live, gate, value)
        if timestep is None and self._live:
            self._warn_unpublished()

    def _write(self, live: Tensor, gate: float, value: float) -> None:
        t = self.timestep
        limit = np.float32(np.float32(gate) + np.float32(TOLERANCE))
        if isinstance(t, Tensor):
            if t.numel() not in (1, live.shape[0]):
                raise refusal(
                    f"timestep has {t.numel()} elements",
                    f"1 or {live.shape[0]}, one per request",
                    "Record one timestep per request of the batch",
                )
            # On the device, without waiting; a NaN is dense.
            live.copy_((t <= float(limit)).to(torch.float32).reshape(-1) * value)
        else:
            live.fill_(value if t is not None and np.float32(t) <= limit else 0.0)

    def _warn_unpublished(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "disabled_until_timestep is set and no timestep has been published in this "
                "context: attention is dense. Call flashskip.record_denoise_step(step, "
                "timestep=t, scheduler=scheduler) before each denoising step.",
                stacklevel=4,
            )


_current: ContextVar[DenoiseProgress] = ContextVar("flashskip_denoise_progress")


def record_denoise_step(
    step_idx: int,
    *,
    timestep: float | Tensor | None = None,
    scheduler: Any = None,
    num_train_timesteps: int | None = None,
    normalized_timestep: float | Tensor | None = None,
) -> None:
    """Publish where the sampler stands, before each denoising step.

    Gated thresholds of this context are written in place: two states, one kernel, one graph. A
    CUDA timestep is compared on its device, without waiting for it.

    Parameters
    ----------
    step_idx : int
        Index of the step; for the reader only. The gate never looks at it.
    timestep : float or torch.Tensor, optional
        The scheduler's timestep, 0 to `num_train_timesteps`; a scalar or ``[batch_size]``. None
        (with no other argument): unknown, so gated attention is dense, with one warning.
    scheduler : object, optional
        Of diffusers: ``scheduler.config.num_train_timesteps`` divides `timestep`.
    num_train_timesteps : int, optional
        The divisor itself.
    normalized_timestep : float or torch.Tensor, optional
        The quotient itself, in [0, 1], instead of `timestep` and a divisor.

    Raises
    ------
    ValueError
        If the arguments do not give exactly one timestep, or a host timestep outside [0, 1].
    """
    divisors = [n for n in (scheduler, num_train_timesteps) if n is not None]
    if normalized_timestep is not None:
        if timestep is not None or bool(divisors):
            raise refusal(
                "normalized_timestep is given together with timestep, scheduler or "
                "num_train_timesteps",
                "one source of the timestep",
                "Drop normalized_timestep, or all the others",
            )
        DenoiseProgress.current().record(step_idx, _checked(normalized_timestep, 1))
        return
    if len(divisors) != (timestep is not None):
        raise refusal(
            f"timestep is {'missing' if timestep is None else 'given'} with {len(divisors)} of "
            "scheduler and num_train_timesteps",
            "timestep with exactly one of them",
            "Pass timestep=t, scheduler=scheduler, or normalized_timestep=t alone",
        )
    if scheduler is not None:
        num_train_timesteps = _num_train_timesteps(scheduler)
    if timestep is not None:
        assert num_train_timesteps is not None
        check_number("num_train_timesteps", num_train_timesteps, above=0)
        timestep = _checked(timestep, num_train_timesteps)
    DenoiseProgress.current().record(step_idx, timestep)


def _num_train_timesteps(scheduler: Any) -> int:
    found = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    if found is None:
        raise ValueError(
            f"scheduler is a {type(scheduler).__name__} without config.num_train_timesteps; "
            "expected a diffusers scheduler. Pass num_train_timesteps or normalized_timestep."
        )
    return int(found)


def _checked(t: float | Tensor, divisor: int) -> float | Tensor:
    """Divide; host values are checked, CUDA ones stay where they are."""
    if isinstance(t, Tensor) and (t.device.type != "cpu" or t.numel() > 1):
        return t.detach().to(torch.float32) / divisor
    normalized = float(t) / divisor
    if not 0 <= normalized <= 1:
        raise refusal(
            f"the normalized timestep is {normalized:g}",
            "0 to 1, from the end of sampling to pure noise",
            "Check the scale of timestep, or pass normalized_timestep",
        )
    return normalized

"""Hold the achieved sparsity at a target while the data drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashskip._checks import check_count
from flashskip._options import refusal
from flashskip.policy.formula import check_number
from flashskip.policy.values import plan_device


class SparsityController:
    """Moves a live threshold so that the counted sparsity meets a target.

    Sparsity grows about linearly with the logarithm of the threshold, so a step is
    ``gain * slope * (target - achieved)`` in that logarithm. Everything is computed on the device
    from the wrapper's counters: no call waits for the GPU, and all can be captured in a graph.

    One threshold serves the whole batch and all heads. Equalising heads would cost several times
    the error at the same total: some can drop nearly every tile, others hardly any.

    Parameters
    ----------
    target_sparsity : float
        Share of visited tiles to skip, in (0, 1].
    threshold : float, optional
        Where to start; then the plan takes a final threshold.
    threshold_scale_factor : float, optional
        Where to start; then the plan takes a factor. One of the two must be given.
    length_exponent : float
        c of ``F / L**c``, with a factor.
    batch_size : int
        Requests of the plan.
    limits : tuple of float, optional
        Lowest and highest value. Default: 1e-8 to 1 for a threshold, a thousandth to a thousand
        times the start for a factor.
    slope : float
        Expected change of ln(threshold) from sparsity 0 to 1: the b of a calibration.
    gain : float
        Share of the expected way that one step takes, in (0, 1].
    tolerance : float
        Hysteresis: the value rests once the sparsity is within half of this, and moves again when
        it is off by more than this.
    device : torch.device or str, optional
        Where the plan runs. Default: the current GPU, or the CPU without one.

    Attributes
    ----------
    value : torch.Tensor
        float32 ``[batch_size]``, live: what the plan reads. Its address never changes.
    achieved : torch.Tensor
        float32 scalar: sparsity of the last update; NaN before.
    saturated : torch.Tensor
        bool scalar: the value rests at a limit and the target is out of reach.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range or no number, or not exactly one start is given.

    Examples
    --------
    >>> import torch, flashskip
    >>> controller = flashskip.SparsityController(0.5, threshold=0.01, device="cpu")
    >>> # wrapper.plan(..., **controller.options())
    >>> # after each run: controller.update(wrapper.stats); wrapper.reset_stats()
    >>> controller.update(torch.tensor([[[20, 100]]]))  # 20 of 100 tiles were skipped
    >>> bool(controller.value > 0.01)
    True
    """

    def __init__(
        self,
        target_sparsity: float,
        *,
        threshold: float | None = None,
        threshold_scale_factor: float | None = None,
        length_exponent: float = 1.0,
        batch_size: int = 1,
        limits: tuple[float, float] | None = None,
        slope: float = 8.0,
        gain: float = 0.5,
        tolerance: float = 0.02,
        device: torch.device | str | None = None,
    ) -> None:
        check_number("target_sparsity", target_sparsity, above=0.0, most=1.0)
        check_number("slope", slope, above=0.0)
        check_number("gain", gain, above=0.0, most=1.0)
        check_number("tolerance", tolerance, least=0.0, most=1.0)
        check_count("batch_size", batch_size, least=0)
        if (threshold is None) == (threshold_scale_factor is None):
            raise refusal(
                f"threshold is {threshold} and threshold_scale_factor is {threshold_scale_factor}",
                "exactly one of them",
                "Pass the one that the plan shall take",
            )
        if threshold is not None and length_exponent != 1.0:
            raise refusal(
                "length_exponent is given with threshold, where it has no effect",
                "it with threshold_scale_factor only",
                "Drop it",
            )
        if threshold is not None:
            name, start, most = "threshold", threshold, 1.0
            limits = limits or (1e-8, 1.0)
            self._options: dict[str, Any] = {}
        else:
            assert threshold_scale_factor is not None
            name, start, most = "threshold_scale_factor", threshold_scale_factor, 3e38
            # "dense" would answer a high factor with no skipping at all, and drive it up forever.
            self._options = {"length_exponent": length_exponent, "overflow": "clamp"}
            limits = limits or (start / 1000, start * 1000)
        check_number(name, start, above=0.0, most=most)
        if not isinstance(limits, Sequence) or len(limits) != 2:
            raise TypeError(
                f"limits is {limits!r}; expected the lowest and the highest value. Pass a pair."
            )
        for limit in limits:
            check_number("limits", limit, above=0.0, most=most)
        if not limits[0] <= start <= limits[1]:
            raise refusal(
                f"{name} is {start} with limits {limits}",
                "a start within them",
                "Correct one",
            )
        self._name = f"skip_softmax_{name}"
        self.target_sparsity = target_sparsity
        self._step, self._tolerance = gain * slope, tolerance
        self._low, self._high = math.log(limits[0]), math.log(limits[1])
        device = plan_device(device)
        with torch.inference_mode(False):  # else it could not be written to outside of it
            self.value = torch.full((batch_size,), start, dtype=torch.float32, device=device)
            self.achieved = torch.full((), math.nan, dtype=torch.float32, device=device)
            self.saturated = torch.zeros((), dtype=torch.bool, device=device)
            self._log = torch.full((), math.log(start), dtype=torch.float32, device=device)
            self._moving = torch.ones((), dtype=torch.bool, device=device)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `plan()`: the live value and the counters that steer it."""
        return {self._name: self.value, **self._options, "collect_stats": True}

    def update(self, *stats: Tensor) -> None:
        """Look at the counters since the last reset, and move the value.

        Parameters
        ----------
        *stats : torch.Tensor
            ``wrapper.stats`` of the layers that `value` steers: int64 ``[..., 2]``, skipped and
            visited. Reset them afterwards. Nothing moves where nothing was visited.

        Raises
        ------
        ValueError, TypeError
            If there are none, they are no tensors, or their last dimension is not 2.
        """
        if not stats:
            raise refusal(
                "update() got no counters",
                "at least one tensor",
                "Pass wrapper.stats",
            )
        for counts in stats:
            if not isinstance(counts, Tensor):
                raise TypeError(
                    f"stats is {type(counts).__name__}; expected a torch.Tensor. Pass "
                    "wrapper.stats."
                )
            if counts.dim() == 0 or counts.shape[-1] != 2:
                raise refusal(
                    f"stats has shape {tuple(counts.shape)}",
                    "(..., 2): skipped and visited",
                    "Pass wrapper.stats",
                )
        total = torch.stack([s.reshape(-1, 2).sum(0) for s in stats]).sum(0).to(torch.float32)
        seen = total[1] > 0
        achieved = total[0] / total[1].clamp(min=1)
        error = self.target_sparsity - achieved
        limit = torch.where(self._moving, self._tolerance / 2, self._tolerance)
        moving = seen & (error.abs() > limit)
        moved = (self._log + moving * self._step * error).clamp(self._low, self._high)
        at_limit = ((moved <= self._low) & (error < 0)) | ((moved >= self._high) & (error > 0))
        self.saturated.copy_(torch.where(seen, moving & at_limit, self.saturated))
        self.achieved.copy_(torch.where(seen, achieved, self.achieved))
        self._moving.copy_(torch.where(seen, moving, self._moving))
        self._log.copy_(moved)
        self.value.copy_(moved.exp().expand_as(self.value))

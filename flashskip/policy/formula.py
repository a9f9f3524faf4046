"""From a target sparsity to a scale factor: F = a * exp(b * target), threshold = F / L**c."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashskip._options import refusal
from flashskip.geometry import Geometry

PHASES = ("prefill", "decode")

# What decides together and against what. Two geometries that agree in these give the same curve;
# the order is without effect where a seed judges. Prefill is measured on whole prompts, so how few
# queries decide (`group_size`, `seed_short_queries`) is no part of a curve, and is not compared.
_DECISIVE = ("heads_per_vote", "rows_per_vote", "keys_per_vote", "judged_against")


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """A calibrated curve of one phase of one model.

    Attributes
    ----------
    a, b : float
        Of the scale factor ``F = a * exp(b * target_sparsity)``.
    c : float
        Exponent of the length: the threshold of a request with L keys is ``F / L**c``.
    sparsity_range : tuple of float, optional
        Lowest and highest sparsity that the fit has seen; other targets are refused.
    length_range : tuple of int, optional
        Shortest and longest request that the fit has seen, in keys.
    measured_in : Geometry, optional
        Order and geometry of the decisions that were measured.
    r_squared, residual : float, optional
        Fit error: share of the variance of ln(threshold) explained, and standard deviation of
        what is left, in nats.

    Raises
    ------
    ValueError
        If a coefficient or a range is out of range.

    Examples
    --------
    >>> from flashskip.policy import Coefficients
    >>> round(Coefficients(a=7.93, b=8.61).factor(0.5), 1)  # Qwen3-30B-A3B, prefill
    587.4
    """

    a: float
    b: float
    c: float = 1.0
    sparsity_range: tuple[float, float] | None = None
    length_range: tuple[int, int] | None = None
    measured_in: Geometry | None = None
    r_squared: float | None = None
    residual: float | None = None

    def __post_init__(self) -> None:  # noqa: D105
        check_number("a", self.a, above=0.0)
        check_number("b", self.b, above=0.0)
        check_number("c", self.c, least=0.0)
        for name in ("r_squared", "residual"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        for name, most in (("sparsity_range", 1.0), ("length_range", math.inf)):
            given = getattr(self, name)
            if given is None:
                continue
            low, high = given
            check_number(name, low)
            check_number(name, high)
            if not 0 <= low <= high <= most:
                raise refusal(
                    f"{name} is {given}",
                    f"a lower and an upper limit, 0 to {most:g}",
                    "Correct the calibration",
                )
            object.__setattr__(self, name, (low, high))

    def factor(self, target_sparsity: float) -> float:
        """Return F for a target.

        Parameters
        ----------
        target_sparsity : float
            In [0, 1), and within `sparsity_range`.

        Raises
        ------
        ValueError
            If the target is out of range, or the factor too large for a float.
        """
        check_number("target_sparsity", target_sparsity, least=0.0, below=1.0)
        if self.sparsity_range is not None:
            low, high = self.sparsity_range
            if not low <= target_sparsity <= high:
                raise refusal(
                    f"target_sparsity is {target_sparsity:g}, "
                    "outside what the calibration has seen",
                    f"{low:g} to {high:g}",
                    "Choose such a target, calibrate for more, or pass threshold instead",
                )
        exponent = math.log(self.a) + self.b * target_sparsity
        if exponent > math.log(3e38):
            raise refusal(
                f"a * exp(b * target_sparsity) is exp({exponent:g})",
                "a factor that fits in float32",
                "Correct the coefficients",
            )
        return math.exp(exponent)

    def threshold(self, target_sparsity: float, kv_len: float) -> float:
        """Return ``F / kv_len**c``, which may exceed 1: see `overflow`."""
        return self.factor(target_sparsity) / float(max(kv_len, 1) ** self.c)


def differs(measured: Geometry, used: Geometry) -> bool:
    """Whether coefficients measured in one geometry mean something else in another."""
    if any(getattr(measured, name) != getattr(used, name) for name in _DECISIVE):
        return True
    return measured.judged_against == "running_max" and measured.order != used.order


def describe(geometry: Geometry) -> str:
    """Say order and geometry in words."""
    judge = f"order {geometry.order}" if geometry.judged_against == "running_max" else "seeded"
    heads = "1 head" if geometry.heads_per_vote == 1 else f"{geometry.heads_per_vote} heads"
    return f"{judge}, {geometry.rows_per_vote} rows of {heads} x {geometry.keys_per_vote} keys"


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return a finite number within limits, or raise and name it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number. Pass a Python float.")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    bounds = [f"> {above:g}"] if above > -math.inf else []
    bounds += [f">= {least:g}"] if least > -math.inf else []
    bounds += [f"<= {most:g}"] if most < math.inf else []
    bounds += [f"< {below:g}"] if below < math.inf else []
    if not (math.isfinite(number) and above < number < below and least <= number <= most):
        raise refusal(
            f"{name} is {value!r}",
            " ".join(["a finite number", " and ".join(bounds)]).strip(),
            "Correct the value",
        )
    return number

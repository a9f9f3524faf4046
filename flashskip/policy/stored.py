"""Coefficients as a checkpoint stores them: a formula from a list, and what is known of the fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flashskip._options import refusal
from flashskip.geometry import Geometry
from flashskip.policy.formula import PHASES, Coefficients, check_number
from flashskip.policy.values import mapping

PLAIN = "a * exp(b * target_sparsity)"
# As a factor that is divided by the length: others, who cannot evaluate it, refusal it.
WITH_EXPONENT = "a * exp(b * target_sparsity) * kv_len**(1 - c)"
_LOGARITHMIC = "exp(log_a + b * target_sparsity)"
_FORMULAS = {
    PLAIN: ({"a", "b"}, {"log_a", "b"}, {"a", "log_a", "b"}),
    _LOGARITHMIC: ({"log_a", "b"}, {"a", "log_a", "b"}),
    WITH_EXPONENT: ({"a", "b", "c"},),
}
# What a checkpoint says of a fit besides its coefficients: ours, and other calibrators'.
_ABOUT = ("sparsity_range", "length_range", "measured_in", "r_squared", "residual")
_ABOUT_ELSEWHERE = {"fit_logspace", "min_observed_sparsity", "max_observed_sparsity"}


def read_coefficients(given: Any, own: Mapping[str, Any]) -> Coefficients | dict[str, Coefficients]:
    """Read ``threshold_scale_factor``: a formula from a list, and its coefficients."""
    alternative = "Pass threshold or threshold_scale_factor instead of the calibration"
    if not isinstance(given, Mapping):
        raise refusal(
            f"the checkpoint's threshold_scale_factor is {given!r}",
            "a mapping with formula and coefficients",
            alternative,
        )
    formula = _known_formula(given.get("formula"))
    names = [key for key in given if key != "formula"]
    if not names or any(name not in (*PHASES, "coefficients") for name in names):
        raise refusal(
            f"threshold_scale_factor has the keys {sorted(given)}",
            "formula, and coefficients or prefill and decode",
            alternative,
        )
    if "coefficients" in names and len(names) > 1:
        raise refusal(
            "threshold_scale_factor has coefficients and phases",
            "one or the other",
            alternative,
        )
    read = {
        name: _read_phase(name, formula, given[name], own.get(name), bool(own)) for name in names
    }
    return read["coefficients"] if names == ["coefficients"] else read


def _known_formula(text: Any) -> str:
    """Return the formula that a text spells: a and b alone say none. Nothing is evaluated."""
    for formula in _FORMULAS:
        if isinstance(text, str) and "".join(text.split()) == "".join(formula.split()):
            return formula
    raise ValueError(
        f"formula is {text!r}; expected one of {', '.join(map(repr, _FORMULAS))}. Pass threshold "
        "or threshold_scale_factor instead of the calibration."
    )


def _read_phase(
    phase: str, formula: str, given: Any, own: Mapping[str, Any] | None, is_ours: bool
) -> Coefficients:
    where = f"threshold_scale_factor[{phase!r}]"
    found = set(given) - _ABOUT_ELSEWHERE if isinstance(given, Mapping) else set()
    wanted = _FORMULAS[formula]
    if found not in wanted:
        raise refusal(
            f"{where} is {given!r}",
            " or ".join("{" + ", ".join(sorted(names)) + "}" for names in wanted)
            + f" for {formula}",
            "Correct the coefficients, or pass threshold or threshold_scale_factor instead",
        )
    for name in found:
        check_number(f"{where}[{name!r}]", given[name])
    a = given.get("a")
    if "log_a" in found:
        log_a = check_number(f"{where}['log_a']", given["log_a"], least=-700.0, most=88.0)
        if a is not None and not math.isclose(a, math.exp(log_a), rel_tol=1e-6):
            raise refusal(
                f"{where} has a = {a} and log_a = {log_a}, which contradict each other",
                "log_a = ln(a)",
                "Drop one of them",
            )
        a = math.exp(log_a) if a is None else a
    about = _read_about(phase, own, is_ours)
    if "min_observed_sparsity" in given and "max_observed_sparsity" in given:
        about["sparsity_range"] = (given["min_observed_sparsity"], given["max_observed_sparsity"])
    return Coefficients(a=a, b=given["b"], c=given.get("c", 1.0), **about)


def _read_about(phase: str, own: Mapping[str, Any] | None, is_ours: bool) -> dict[str, Any]:
    """Read what is stored of a fit besides its coefficients, by `_about`."""
    if not is_ours:
        return {"measured_in": _public_calibrators(phase)}
    about = dict(mapping(f"flashskip[{phase!r}]", own or {}))
    unknown = sorted(set(about) - set(_ABOUT))
    if bool(unknown):
        raise refusal(
            f"flashskip[{phase!r}] has the key {', '.join(map(repr, unknown))}",
            f"only {', '.join(_ABOUT)}",
            "Remove it",
        )
    try:
        if "measured_in" in about:
            about["measured_in"] = Geometry(**about["measured_in"])
        for name in ("sparsity_range", "length_range"):
            if name in about:
                low, high = about[name]
                about[name] = (low, high)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"flashskip[{phase!r}] is {own!r} ({error}); expected what to_checkpoint() wrote. "
            "Calibrate again, or remove it."
        ) from error
    return about


def _public_calibrators(phase: str) -> Geometry:
    """Geometry that published coefficients were measured in, which they do not state."""
    rows = 1 if phase == "decode" else 128
    return Geometry(
        heads_per_vote=1,
        rows_per_vote=rows,
        keys_per_vote=128,
        keys_per_load=128,
        rows_per_block=rows,
        order="ascending",
        judged_against="running_max",
        causal=True,
        window_left=-1,
    )


def write_coefficients(
    coefficients: Coefficients | Mapping[str, Coefficients],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``threshold_scale_factor``, and what is known of each fit, for `read_coefficients`."""
    phases = coefficients if isinstance(coefficients, Mapping) else {"coefficients": coefficients}
    two = all(x.c == 1.0 for x in phases.values())
    formula: dict[str, Any] = {"formula": PLAIN if two else WITH_EXPONENT}
    for phase, x in phases.items():
        formula[phase] = {"a": x.a, "b": x.b} if two else {"a": x.a, "b": x.b, "c": x.c}
    return formula, {phase: _about(x) for phase, x in phases.items()}


def _about(x: Coefficients) -> dict[str, Any]:
    """Return what is known of a fit besides its coefficients, as JSON has it."""
    about = {name: getattr(x, name) for name in _ABOUT if getattr(x, name) is not None}
    if x.measured_in is not None:
        about["measured_in"] = dataclasses.asdict(x.measured_in)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in about.items()}

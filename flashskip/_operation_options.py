"""Options of a plan as each operation takes them: what only the other one has is refused."""

from __future__ import annotations

from typing import Any

from flashskip._options import FP8, PlanOptions, refusal
from flashskip.errors import UnsupportedVariant


def prefill_options(options: dict[str, Any]) -> PlanOptions:
    """Check options, also the one that prefill does not have."""
    checked = PlanOptions(**options)
    if checked.kv_dtype == FP8:
        raise UnsupportedVariant(
            f"kv_data_type is {FP8} in prefill; supported: {checked.q_data_type}, as q. Convert K "
            "and V; decode attends to FP8 caches."
        )
    return checked


def decode_options(options: dict[str, Any]) -> PlanOptions:
    """Check options, also those that decode does not have."""
    for name in ("causal", "order"):
        if name in options:
            raise refusal(
                f"{name} is given to decode, where it has no effect",
                "it in prefill only",
                f"Drop {name}",
            )
    checked = PlanOptions(**options)
    if checked.skip_criterion == "budget":
        raise UnsupportedVariant(
            "skip_criterion is 'budget' in decode, whose splits share no budget; supported: "
            "'threshold', 'measure'. Pass a threshold, and collect_bound=True for a certificate."
        )
    if checked.vote_kv not in (None, 64):
        raise UnsupportedVariant(
            f"vote_kv is {checked.vote_kv} in decode; supported: None or 64. Drop vote_kv."
        )
    return checked

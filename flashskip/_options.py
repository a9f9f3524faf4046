"""The keyword options of `plan()`: one list for both wrappers, checked first."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from flashskip.geometry import ORDERS

FP8 = torch.float8_e4m3fn
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "e4m3"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the last one on the CPU
OVERFLOWS = ("dense", "clamp")
CRITERIA = ("threshold", "budget", "measure")
SMALLEST, LARGEST = 1e-15, 1e15  # of numbers: kernels hold them, and their quotients, in fp32
LIVE = ("skip_softmax_threshold", "skip_softmax_threshold_scale_factor")  # may be tensors


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    Attributes
    ----------
    q_data_type : torch.dtype
        Element type of q: bfloat16 or float16; on the CPU float32 too.
    kv_data_type : torch.dtype, optional
        Of K and V: that of q, the default, or in decode ``torch.float8_e4m3fn``.
    o_data_type : torch.dtype, optional
        Of the output: bfloat16 or float16; on the CPU float32 too. Default: that of q.
    causal : bool
        Prefill only. Query row i of a request sees key j iff ``j <= i + kv_len - qo_len``.
    sm_scale : float, optional
        Multiplies q.k before the softmax: 1e-15 to 1e15. Default ``1 / sqrt(head_dim_qk)``.
    window_left : int
        A row sees at most this many keys to the left of its own position; -1 is unlimited.
    logits_soft_cap : float, optional
        ``c * tanh(x / c)`` after the scale, before mask and skip test; None or 0 is off.
    sinks : torch.Tensor, optional
        Learned logit per query head, fp32 ``[num_qo_heads]``, natural-log units; joins the
        denominator.
    skip_softmax_threshold : float or torch.Tensor, optional
        Final lambda in [0, 1], or fp32 ``[batch_size]`` on the plan's device, read by each run.
        None: the dense kernel. 0: the skip kernel, which then never skips.
    skip_softmax_threshold_scale_factor : float or torch.Tensor, optional
        F: lambda = F / L**length_exponent with each request's own KV length L.
    length_exponent : float
        c of the formula above.
    threshold_kv_len : torch.Tensor, optional
        int32 ``[batch_size]``: the length to divide by instead of L.
    overflow : {"dense", "clamp"}
        What a lambda >= 1 that results from F means for its request: no skipping, or lambda = 1.
    skip_criterion : {"threshold", "budget", "measure"}
        The test. "budget" (prefill only) keeps what each row omits of its softmax mass at or below
        `skip_budget`. "measure" runs dense and fills `gaps`. Both take `order` and `vote_kv`, a
        budget also `collect_stats` and `collect_bound`.
    skip_budget : float, optional
        The epsilon of the budget criterion, in (0, 1].
    order : str
        Prefill only: visiting order of the tiles; few queries on a long cache decide without it.
    vote_kv : {None, 64, 128}
        Keys of one decision; None is the default of the kernel: 64. Decode has 64 only.
    collect_stats : bool
        Count skipped and visited decisions into `stats`.
    collect_bound : bool
        Return a certified bound on each row's omitted softmax mass.

    References
    ----------
    Skip-Softmax: arXiv 2512.12087.
    """

    q_data_type: torch.dtype
    kv_data_type: torch.dtype | None = None
    o_data_type: torch.dtype | None = None
    causal: bool = False
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    skip_softmax_threshold: float | torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | torch.Tensor | None = None
    length_exponent: float = 1.0
    threshold_kv_len: torch.Tensor | None = None
    overflow: str = "dense"
    skip_criterion: str = "threshold"
    skip_budget: float | None = None
    order: str = ORDERS[0]
    vote_kv: int | None = None
    collect_stats: bool = False
    collect_bound: bool = False

    def __post_init__(self) -> None:
        for name in ("q_data_type", "kv_data_type", "o_data_type"):
            self._check_dtype(name)
        for name in ("causal", "collect_stats", "collect_bound"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} is {getattr(self, name)!r}; expected True or False. Pass a bool."
                )
        self._check_number("sm_scale", least=SMALLEST, most=LARGEST)
        self._check_number("logits_soft_cap", least=SMALLEST, most=LARGEST, or_zero=True)
        self._check_number("length_exponent", least=0.0, most=LARGEST)
        self._check_number("skip_softmax_threshold", least=0.0, most=1.0)
        self._check_number("skip_softmax_threshold_scale_factor", least=0.0, most=LARGEST)
        self._check_number("skip_budget", least=SMALLEST, most=1.0)
        is_count = isinstance(self.window_left, int) and not isinstance(self.window_left, bool)
        if not is_count or not -1 <= self.window_left <= 2**30:
            raise ValueError(
                f"window_left is {self.window_left!r}; expected -1 (unlimited) or a number of "
                f"keys from 0 to 2**30. Correct the value."
            )
        check_choice("overflow", self.overflow, OVERFLOWS)
        check_choice("skip_criterion", self.skip_criterion, CRITERIA)
        check_choice("order", self.order, ORDERS)
        check_choice("vote_kv", self.vote_kv, (None, 64, 128))
        self._check_combinations()

    @property
    def skips(self) -> bool:
        """Whether tiles may be skipped."""
        return self.threshold is not None or self.skip_criterion == "budget"

    @property
    def decides(self) -> bool:
        """Whether tiles are judged, be it to skip them or to measure."""
        return self.criterion != "dense"

    @property
    def criterion(self) -> str:
        """The test that the kernel is compiled with: "dense" where there is none."""
        plain = self.skip_criterion == "threshold" and self.threshold is None
        return "dense" if plain else self.skip_criterion

    @property
    def threshold(self) -> float | torch.Tensor | None:
        """The threshold or the factor, whichever was given."""
        if self.skip_softmax_threshold is not None:
            return self.skip_softmax_threshold
        return self.skip_softmax_threshold_scale_factor

    @property
    def threshold_is_factor(self) -> bool:
        """Whether `threshold` is to be divided by a length."""
        return self.skip_softmax_threshold_scale_factor is not None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of K and V."""
        return self.kv_data_type or self.q_data_type

    @property
    def o_dtype(self) -> torch.dtype:
        """Element type of the output."""
        return self.o_data_type or self.q_data_type

    def scale(self, head_dim_qk: int) -> float:
        """Return the factor of q.k."""
        return 1.0 / math.sqrt(head_dim_qk) if self.sm_scale is None else float(self.sm_scale)

    def _check_dtype(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "q_data_type":
            return
        if not isinstance(value, torch.dtype):
            raise TypeError(
                f"{name} is {value!r}; expected a torch.dtype such as torch.bfloat16. Pass the "
                f"dtype itself."
            )
        if value not in DTYPES and not (name == "kv_data_type" and value == FP8):
            raise refusal(
                f"{name} is {value}",
                "torch.bfloat16, torch.float16 or, on the CPU, torch.float32"
                + (" (decode: also torch.float8_e4m3fn)" if name == "kv_data_type" else ""),
                "Convert the tensors",
            )

    def _check_number(
        self,
        name: str,
        *,
        least: float,
        most: float,
        or_zero: bool = False,
    ) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, torch.Tensor) and name in LIVE:
            check_no_gradient(name, value)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}; expected a number. Pass a Python float.")
        if not (least <= value <= most or (or_zero and value == 0)):
            raise refusal(
                f"{name} is {value!r}",
                f"{'0 or ' if or_zero else ''}a finite number >= {least:g} and <= {most:g}",
                "Correct the value",
            )

    def _check_combinations(self) -> None:
        """Refuse what would have no effect: nothing is accepted and ignored."""
        if self.kv_dtype not in (self.q_data_type, FP8):
            raise refusal(
                f"kv_data_type is {self.kv_dtype} and q_data_type is {self.q_data_type}",
                "the same for both (decode: also torch.float8_e4m3fn for K and V)",
                "Convert K and V",
            )
        given = self.threshold is not None
        if (
            self.skip_softmax_threshold is not None
            and self.skip_softmax_threshold_scale_factor is not None
        ):
            raise refusal(
                "skip_softmax_threshold and skip_softmax_threshold_scale_factor are both given",
                "one source of the threshold",
                "Drop one of them",
            )
        if given and self.skip_criterion != "threshold":
            raise refusal(
                f"skip_criterion is {self.skip_criterion!r} and a threshold is given",
                "a threshold only with skip_criterion='threshold'",
                "Drop the threshold or the criterion",
            )
        if (self.skip_budget is not None) != (self.skip_criterion == "budget"):
            raise refusal(
                f"skip_budget is {self.skip_budget} with skip_criterion={self.skip_criterion!r}",
                "skip_budget exactly when skip_criterion is 'budget'",
                "Pass both or neither",
            )
        factor_only = [
            ("threshold_kv_len", self.threshold_kv_len is not None),
            ("length_exponent", self.length_exponent != 1.0),
            ("overflow", self.overflow != "dense"),
        ]
        for name, changed in factor_only:
            if changed and not self.threshold_is_factor:
                raise refusal(
                    f"{name} is given without a scale factor, where it has no effect",
                    f"{name} only with skip_softmax_threshold_scale_factor",
                    f"Drop {name} or pass the factor",
                )
        needs = [
            ("order", self.order != ORDERS[0], self.decides),
            ("vote_kv", self.vote_kv is not None, self.decides),
            ("collect_stats", self.collect_stats, self.skips),
            ("collect_bound", self.collect_bound, self.skips),
        ]
        for name, changed, has_effect in needs:
            if changed and not has_effect:
                advice = f"Drop {name}"
                if not self.decides:
                    advice += (
                        ", or pass skip_softmax_threshold=0.0 for a skip kernel that never skips"
                    )
                raise refusal(
                    f"{name} is given without a skip test, where it has no effect",
                    f"{name} only with a threshold, a scale factor or a budget"
                    + (" or skip_criterion='measure'" if name in ("order", "vote_kv") else ""),
                    advice,
                )


def refusal(found: str, expected: str, advice: str) -> ValueError:
    """Return the error that says what was found, what is expected and what to do."""
    return ValueError(f"{found}; expected {expected}. {advice}.")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`; a tensor or 64.0 for 64 is none."""
    if not any(isinstance(value, type(c)) and value == c for c in choices):
        raise refusal(
            f"{name} is {value!r}",
            "one of " + ", ".join(map(repr, choices)),
            "Pass one of these",
        )


def check_no_gradient(name: str, t: torch.Tensor) -> None:
    """Raise where a gradient would be expected of `t`."""
    if t.requires_grad and torch.is_grad_enabled():
        raise refusal(
            f"{name} requires a gradient",
            "a tensor without: flashskip is forward only",
            "Call under torch.no_grad() or pass a detached tensor",
        )


F = TypeVar("F", bound=Callable[..., Any])


def takes_plan_options(method: F) -> F:
    """Give a method `(..., **options)` a signature that lists the options, for `help()`."""
    signature = inspect.signature(method)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    listed = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.name == "q_data_type" else f.default,
            annotation=f.type,
        )
        for f in fields(PlanOptions)
    ]
    names = [p.name for p in (*own[1:], *sorted(listed, key=lambda p: p.name))]
    named = {*names, *signature.parameters}

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= named:
            raise TypeError(
                f"{method.__qualname__}() got {min(kwargs.keys() - named)!r}; expected one of "
                f"{', '.join(names)}. Check the spelling."
            )
        if "q_data_type" not in kwargs:
            raise TypeError(
                f"{method.__qualname__}() got no q_data_type; expected the element type of q, such "
                "as torch.bfloat16. Pass q_data_type=q.dtype."
            )
        return method(*args, **kwargs)

    checked.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]

"""What is fixed when a kernel is compiled: the one list behind warmup, tests and docs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from flashskip.geometry import ORDERS

# What a compiled kernel can be, field by field; None: a choice that the operation does not have.
DOMAINS: dict[str, dict[str, tuple[object, ...]]] = {
    "prefill": {
        "q_dtype": ("bf16", "fp16"),
        "kv_dtype": ("bf16", "fp16"),
        "o_dtype": ("bf16", "fp16"),
        "head_dim_qk": (64, 96, 128, 192, 256),
        "head_dim_vo": (64, 96, 128, 256),
        "kv_path": ("ragged", "paged_tma", "paged_gather"),
        "rows": (None,),
        "causal": (False, True),
        "window": (False, True),
        "soft_cap": (False, True),
        "sinks": (False, True),
        "skip": ("dense", "threshold", "budget", "measure"),
        "order": (None, *ORDERS),
        "vote_kv": (None, 64, 128),
        "stats": (False, True),
        "bound": (False, True),
        "arch": ("sm_90a",),
    },
    "decode": {
        "q_dtype": ("bf16", "fp16"),
        "kv_dtype": ("bf16", "fp16", "e4m3"),
        "o_dtype": ("bf16", "fp16"),
        "head_dim_qk": (64, 96, 128, 256),
        "head_dim_vo": (64, 96, 128, 256),
        "kv_path": ("paged_tma", "paged_gather"),
        "rows": (8, 16, 24, 32, 40, 48, 56, 64),
        "causal": (False, True),
        "window": (False, True),
        "soft_cap": (False, True),
        "sinks": (False, True),
        "skip": ("dense", "threshold", "measure"),
        "order": (None,),
        "vote_kv": (None, 64),
        "stats": (False, True),
        "bound": (False, True),
        "arch": ("sm_90a",),
    },
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled kernel, completely described.

    Nothing else reaches a template, so two equal Variants are the same kernel, and a field that
    changes no rendered text is a defect.
    """

    op: str  # "prefill" or "decode"
    q_dtype: str  # "bf16", "fp16"
    kv_dtype: str
    o_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    kv_path: str  # "ragged", "paged_tma", "paged_gather": where K and V come from
    rows: int | None  # decode: query rows of a work item, padded to a multiple of 8
    causal: bool
    window: bool  # a left limit of what a row sees; its length is a run-time value
    soft_cap: bool
    sinks: bool
    skip: str  # "dense"; "threshold": a final lambda; "budget"; "measure": dense, notes each gap
    order: str | None  # prefill with decisions: in which order tiles are visited
    vote_kv: int | None  # keys of one decision; None in a dense kernel
    stats: bool  # count decisions
    bound: bool  # certify the omitted mass of each row
    arch: str = "sm_90a"

    @property
    def symbol(self) -> str:
        """The kernel's name, made of every field: `flashskip_prefill_bf16_…`."""
        parts = ["flashskip"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _UNTAGGED:
                parts += [str(value).replace("sm_", "sm")] if value is not None else []
            elif value is True:
                parts.append(field.name)
            elif value is not None and value is not False:
                parts.append(f"{_TAGS[field.name]}{value}")
        return "_".join(parts)

    @property
    def mma_dtype(self) -> str:
        """Element type in which products are computed: FP8 becomes fp16, which holds it exactly."""
        return "fp16" if self.kv_dtype == "e4m3" else self.kv_dtype

    @property
    def mma_type(self) -> str:
        """The same as PTX names it."""
        return {"bf16": "bf16", "fp16": "f16"}[self.mma_dtype]

    @classmethod
    def from_symbol(cls, symbol: str) -> Variant:
        """Return the Variant with this symbol.

        Raises
        ------
        ValueError
            If no supported Variant has it.
        """
        try:
            return _by_symbol()[symbol]
        except KeyError:
            raise ValueError(
                f"variant {symbol!r} is unknown; expected one of the symbols that "
                "`flashskip variants` lists. Check the spelling and the version."
            ) from None


_TAGS = {
    "kv_dtype": "kv",
    "o_dtype": "o",
    "head_dim_qk": "qk",
    "head_dim_vo": "vo",
    "rows": "rows",
    "vote_kv": "vote",
}
_UNTAGGED = ("op", "q_dtype", "kv_path", "skip", "order", "arch")


def most_rows(kv_dtype: str, head_dim_vo: int) -> int:
    """Return how many query rows of a KV head a decode kernel takes together, at most.

    Of 256 channels no more fit the registers; of others, no more decide together.
    """
    if head_dim_vo < 256:
        return 64
    return 16 if kv_dtype == "e4m3" else 40


def unit_rows(rows: int, kv_dtype: str, head_dim_vo: int) -> int:
    """Return the `rows` of the decode kernel for so many query rows of a KV head.

    What is more than it takes together is cut into units, each of which reads K and V.
    """
    return min(-(-rows // 8) * 8, most_rows(kv_dtype, head_dim_vo))


# Channels of V that go with those of K.
_HEAD_DIM_VO = {64: 64, 96: 96, 128: 128, 192: 128, 256: 256}

# What fields must satisfy together: the one at fault if they do not, and the condition, whose
# parameters are the fields that it looks at.
_RULES: tuple[tuple[str, Callable[..., bool]], ...] = (
    ("kv_dtype", lambda q_dtype, kv_dtype: kv_dtype in (q_dtype, "e4m3")),
    ("head_dim_vo", lambda head_dim_qk, head_dim_vo: head_dim_vo == _HEAD_DIM_VO[head_dim_qk]),
    ("rows", lambda kv_dtype, head_dim_vo, rows: (rows or 0) <= most_rows(kv_dtype, head_dim_vo)),
    ("order", lambda op, skip, order: (order is not None) == (op == "prefill" and skip != "dense")),
    ("vote_kv", lambda skip, vote_kv: (vote_kv is not None) == (skip != "dense")),
    # Of other orders, the loaders that gather rows have too few registers beside a budget.
    (
        "order",
        lambda kv_path, skip, order: (
            (kv_path, skip) != ("paged_gather", "budget") or order == ORDERS[0]
        ),
    ),
    ("stats", lambda skip, stats: skip not in ("dense", "measure") or not stats),
    ("bound", lambda skip, bound: skip not in ("dense", "measure") or not bound),
)
_READ_BY_RULE = [tuple(inspect.signature(holds).parameters) for _, holds in _RULES]


@cache
def fault(v: Variant) -> str | None:
    """Name the first field that makes `v` unsupported, or None when it is supported."""
    domain = DOMAINS[v.op]
    for name, values in domain.items():
        if getattr(v, name) not in values:
            return name
    return next(_broken(dataclasses.asdict(v)), None)


def _broken(fields: Mapping[str, object], last: str | None = None) -> Iterator[str]:
    """Faults of complete rules; with `last`, the field set last, only of those that look at it."""
    for (at_fault, holds), names in zip(_RULES, _READ_BY_RULE, strict=True):
        if last is not None and (last not in names or not fields.keys() >= set(names)):
            continue
        if not holds(*(fields[name] for name in names)):
            yield at_fault


def supported(v: Variant) -> bool:
    """Whether a kernel for `v` exists."""
    return fault(v) is None


def alternatives(v: Variant, field: str) -> list[object]:
    """Values of `field` with which `v` would be supported as far as that field is concerned."""
    choices = [c for c in DOMAINS[v.op][field] if supported(dataclasses.replace(v, **{field: c}))]  # type: ignore[arg-type]
    return choices or [c for c in DOMAINS[v.op][field] if c is not None]


@cache
def every() -> tuple[Variant, ...]:
    """All supported Variants, in a fixed order."""
    return tuple(
        Variant(**fields)  # type: ignore[arg-type]
        for op in DOMAINS
        for fields in _completions({"op": op}, list(DOMAINS[op]))
    )


def _completions(fields: dict[str, object], names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Give the fields `names` all values that break no rule, dropping bad beginnings early."""
    if not names:
        yield fields
        return
    name, *rest = names
    for value in DOMAINS[str(fields["op"])][name]:
        longer = {**fields, name: value}
        if not any(_broken(longer, name)):
            yield from _completions(longer, rest)


@cache
def _by_symbol() -> dict[str, Variant]:
    return {v.symbol: v for v in every()}


def _pair_masks(variants: Sequence[Variant]) -> dict[Variant, int]:
    """All pairs of (field, value) of each Variant as the bits of one number."""
    numbers: dict[object, int] = {}
    bits: dict[tuple[int, int], int] = {}
    names = [f.name for f in dataclasses.fields(Variant) if f.name != "op"]
    masks = {}
    for v in variants:
        items = [numbers.setdefault((v.op, n, getattr(v, n)), len(numbers)) for n in names]
        mask = 0
        for pair in itertools.combinations(items, 2):
            mask |= 1 << bits.setdefault(pair, len(bits))
        masks[v] = mask
    return masks


@cache
def matrix() -> tuple[Variant, ...]:
    """Return a finite list with every value and every possible pair of values of the fields.

    CI compiles it, `flashskip warmup --arch` builds it, and the GPU tests run it. It is chosen
    greedily from `every()`, so it only changes when a domain does.
    """
    chosen: list[Variant] = []
    rest = _pair_masks(every())
    wanted = functools.reduce(operator.or_, rest.values())
    while wanted:
        best = max(rest, key=lambda v: (rest[v] & wanted).bit_count())  # the first of equals
        chosen.append(best)
        wanted &= ~rest.pop(best)
    return tuple(sorted(chosen, key=lambda v: v.symbol))

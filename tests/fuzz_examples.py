"""Random calls of a given kernel, for the GPU fuzzer.

An example is a Variant and a seed. The Variant is drawn first, from a short list, so that few
kernels need compiling; lengths, page tables, strides, option values and tensors follow from the
seed. It runs on any device: on the CPU the wrappers run the reference in float32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from helpers import make_ragged, poison, poisoned
from paged import FP8, Paged, make_paged, to_pages
from torch import Tensor

import flashskip
from flashskip.variant import Variant, every, matrix, unit_rows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": FP8}
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385)
THRESHOLDS = (0.0, 1e-30, 1e-3, 0.02, 0.1, 0.5, 0.9, 1.0)


NUMBERS = range(80)  # of the kernels, for tests that are parametrised without working them out


@cache
def variants() -> tuple[Variant, ...]:
    """Every value and pair of values of the fields, then more kernels that count decisions."""
    chosen = set(matrix())
    counting = [v for v in every() if v.stats and v not in chosen]
    return (*matrix(), *random.Random(0).sample(counting, len(NUMBERS) - len(chosen)))


@dataclass(frozen=True)
class Example:
    """A planned wrapper, what it is run on, and what that means to the oracle.

    `qo`, `kv` say where each request's rows lie in `q` and in the gathered `k`, `v`, which are the
    numbers that an FP8 cache and its `scales` stand for. `alone` lists per request the tensors and
    places that belong to it and to nobody else.
    """

    wrapper: Any
    inputs: tuple[Any, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    qo: list[int]
    kv: list[int]
    options: dict[str, Any]
    alone: list[list[tuple[Tensor, Any]]]
    lse_base: str
    text: str
    scales: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of q that belong to a request."""
        return self.qo[-1]


def draw(v: Variant, seed: int, device: str, longest: int) -> Example:
    """Draw and plan an example; requests have at most `longest` keys."""
    rng = random.Random(f"{v.symbol} {seed}")
    return (draw_prefill if v.op == "prefill" else draw_decode)(v, rng, device, longest)


# ---- tensors -------------------------------------------------------------------------------------


def draw_length(rng: random.Random, longest: int) -> int:
    """Often a length at the edge of a tile."""
    edges = [n for n in EDGES if n <= longest]
    return rng.choice(edges) if rng.random() < 0.4 else rng.randint(0, longest)


def draw_request(rng: random.Random, longest: int) -> tuple[int, int]:
    """Queries and keys of a prefill: often few queries, and about 8 keys or many for each."""
    kind = rng.choice(["prompt", "any", "any", "few", "long", "long"])
    kv_len = draw_length(rng, longest)
    if kind == "prompt":
        return kv_len, kv_len
    if kind == "any":
        return draw_length(rng, longest // 2), kv_len
    qo_len = rng.choice([1, 2, 16, 63, 64, 65, rng.randint(1, 63)])
    if kind == "few":
        return min(qo_len, longest), kv_len
    qo_len = min(rng.choice([qo_len, longest // 8]), longest // 8)
    more = [-1, 0, 1, rng.randint(0, longest), rng.randint(0, 4 * longest)]
    return qo_len, max(8 * qo_len + rng.choice(more), 0)


def spread(t: Tensor, rng: random.Random) -> Tensor:
    """Copy into a view with gaps in some strides, all of them NaN."""
    tokens, heads, channels = rng.randrange(3), rng.randrange(2), rng.choice([0, 8])
    wide = poisoned(
        (t.shape[0] + tokens, t.shape[1] + heads, t.shape[2] + channels), t.dtype, t.device
    )
    view = wide[tokens:, heads:, : t.shape[2]]
    view.copy_(t)
    return view


def draw_content(rng: random.Random) -> dict[str, Any]:
    """Draw the seed of the tensors, and whether some tiles matter more than others."""
    return {
        "seed": rng.randrange(2**31),
        "hot": rng.choice([None, 0.1, 0.3, 0.3]),
        "gain": rng.choice([8.0, 12.0]),
    }


def workspace(device: str) -> Tensor | None:
    """CPU tensors run on the CPU where there is a GPU, too."""
    return torch.empty(0) if device == "cpu" else None


def draw_prefill(v: Variant, rng: random.Random, device: str, longest: int) -> Example:
    """A ragged or paged batch; rows past the last request are NaN, and so are free slots."""
    kv_heads, group = rng.randint(1, 3), rng.choice([1, 1, 2, 3, 4, 5, 7])
    lengths = [draw_request(rng, longest) for _ in range(rng.randint(0, 6))]
    qo_lens, kv_lens = [qo for qo, _ in lengths], [kv for _, kv in lengths]
    surplus = [rng.choice([0, 0, 1, 70]) for _ in range(2)]
    batch = make_ragged(
        [*qo_lens, surplus[0]], [*kv_lens, surplus[1]], kv_heads * group, kv_heads,
        (v.head_dim_qk, v.head_dim_vo), DTYPES[v.q_dtype], device=device, **draw_content(rng),
    )  # fmt: skip
    *spans, (past_rows, past_keys) = batch.spans()
    for t, past in ((batch.q, past_rows), (batch.k, past_keys), (batch.v, past_keys)):
        poison(t[past])
    q, k, values = (spread(t, rng) for t in (batch.q, batch.k, batch.v))
    options = draw_options(v, rng, len(kv_lens), kv_heads * group, device)
    qo, kv = batch.qo_indptr[:-1].clone(), batch.kv_indptr[:-1].clone()
    heads = (kv_heads * group, kv_heads)
    shown = f"{qo_lens=} {kv_lens=} {surplus=} {kv_heads=} {group=} {_show(options)}"
    if v.kv_path == "ragged":
        wrapper = flashskip.BatchPrefillWrapper(workspace(device))
        wrapper.plan(qo, kv, *heads, v.head_dim_qk, v.head_dim_vo, **options)
        inputs: tuple[Any, ...] = (q, k, values)
        alone = [[(q, rows), (k, keys), (values, keys)] for rows, keys in spans]
    else:
        page_size, layout, form = draw_pages(v, rng)
        pages = to_pages(replace(batch, q=q, qo_indptr=qo, kv_indptr=kv), page_size, layout, form)
        wrapper = flashskip.BatchPrefillWrapper(workspace(device), layout)
        shape = (*heads, v.head_dim_qk, page_size)
        wrapper.plan_paged(qo, *pages.table, *shape, head_dim_vo=v.head_dim_vo, **options)
        inputs = (q, pages.cache)
        own = zip(spans, pages.places, strict=True)
        alone = [[(q, rows), (pages.k, at), (pages.v, at)] for (rows, _), at in own]
        shown += f" {page_size=} {layout} {form}"
    assert wrapper.variant == v
    return Example(
        wrapper, inputs, q, k, values, qo.tolist(), kv.tolist(), options, alone,
        rng.choice(["log2", "e"]), shown,
    )  # fmt: skip


def draw_pages(v: Variant, rng: random.Random) -> tuple[int, str, str]:
    """Draw a page size that the kernel is for, a layout and a form of the cache."""
    whole = [16, 64, 8, 32, 256] if v.op == "decode" else [16, 64, 8, 32, 128, 256]
    sizes = whole if v.kv_path == "paged_tma" else [1, 2, 3, 5, 7, 48, 100]
    form = "pair" if v.head_dim_qk != v.head_dim_vo else rng.choice(["tensor", "pair", "strided"])
    return rng.choice(sizes), rng.choice(["NHD", "HND"]), form


def draw_rows(v: Variant, rng: random.Random) -> tuple[int, int]:
    """Draw a GQA ratio and a number of query tokens that the kernel's rows are made for."""
    tokens = range(2, 9) if v.causal else (1,)
    pairs = [(group, n) for n in tokens for group in range(1, 73)]
    return rng.choice(
        [(g, n) for g, n in pairs if unit_rows(g * n, v.kv_dtype, v.head_dim_vo) == v.rows]
    )


def draw_decode(v: Variant, rng: random.Random, device: str, longest: int) -> Example:
    """A paged batch: pages shuffled, some shared or repeated, unused ones and free slots NaN."""
    (group, q_len), kv_heads = draw_rows(v, rng), rng.choice((1, 1, 2, 2, 3, 8))
    page_size, layout, form = draw_pages(v, rng)
    kv_lens = [draw_length(rng, longest) for _ in range(rng.randint(0, 6))]
    if kv_lens and rng.random() < 0.3:
        kv_lens[0] = 4 * longest  # cut by work boundaries
    batch = make_paged(
        kv_lens, kv_heads * group, kv_heads, v.head_dim_qk, page_size, DTYPES[v.q_dtype],
        kv_dtype=DTYPES[v.kv_dtype], layout=layout, form=form, q_len=q_len, device=device,
        **draw_content(rng),
    )  # fmt: skip
    batch.q = spread(batch.q, rng)
    if v.kv_dtype == "e4m3":
        batch.scales = draw_scales(rng, kv_heads, device)
    shares = rng.random() < 0.5 and share_pages(batch, kv_lens, rng)
    beyond = torch.full((rng.randrange(3),), 2**30, dtype=torch.int32, device=device)
    batch.indices = torch.cat([batch.indices, beyond])  # entries that no request uses
    batch.last_page_len[batch.indptr.diff() == 0] = -7  # has no meaning there
    options = draw_options(v, rng, len(kv_lens), kv_heads * group, device)
    wrapper = flashskip.BatchDecodeWrapper(workspace(device), layout)
    shape = (kv_heads * group, kv_heads, v.head_dim_qk, page_size)
    wrapper.plan(*batch.table, *shape, q_len_per_req=q_len, **options)
    assert wrapper.variant == v
    k, values, kv = batch.gathered()
    qo = [i * q_len for i in range(len(kv_lens) + 1)]
    return Example(
        wrapper, (batch.q, batch.cache), batch.q, k, values, qo, kv.tolist(), options,
        [_own(batch, i, n, q_len, shares) for i, n in enumerate(kv_lens)],
        rng.choice(["log2", "e"]),
        f"{kv_lens=} {page_size=} {layout} {form} {q_len=} {kv_heads=} {group=} {shares=} "
        f"{_show(options)} {_show(batch.scales)}",
        batch.scales,
    )  # fmt: skip


def draw_scales(rng: random.Random, kv_heads: int, device: str) -> dict[str, Any]:
    """Draw k_scale and v_scale: left out, a number, a tensor for all heads or for each."""
    scales: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        values = [rng.choice([0.25, 0.7, 1.0, 1.5]) for _ in range(kv_heads)]
        given = rng.choice([None, values[0], values[:1], values])
        if given is not None:
            number = isinstance(given, float)
            scales[name] = given if number else torch.tensor(given, device=device)
    return scales


def share_pages(batch: Paged, kv_lens: list[int], rng: random.Random) -> bool:
    """Let entries of the page table name full pages that others name already."""
    page_size, starts = batch.k.shape[1], batch.indptr.tolist()
    full = [starts[i] + n for i, length in enumerate(kv_lens) for n in range(length // page_size)]
    if not full:
        return False
    ids = batch.indices.tolist()
    shared = [ids[rng.choice(full)] if rng.random() < 0.3 else page for page in ids]
    batch.indices.copy_(torch.tensor(shared))
    return True


def _own(batch: Paged, i: int, n: int, q_len: int, shares: bool) -> list[tuple[Tensor, Any]]:
    """What belongs to request `i` of `n` keys alone: its queries, and its keys unless shared."""
    owned: list[tuple[Tensor, Any]] = [(batch.q, slice(i * q_len, (i + 1) * q_len))]
    if not shares:
        place = batch.place(i, torch.arange(n, device=batch.q.device))
        owned += [(batch.k, place), (batch.v, place)]
    return owned


# ---- options -------------------------------------------------------------------------------------


def draw_options(
    v: Variant, rng: random.Random, batch_size: int, num_qo_heads: int, device: str
) -> dict[str, Any]:
    """Draw values for the options with which a plan chooses `v`."""
    options: dict[str, Any] = {
        "q_data_type": DTYPES[v.q_dtype],
        "o_data_type": DTYPES[v.o_dtype],
        "sm_scale": rng.choice([None, None, 0.05, 0.2]),
    }
    if v.kv_dtype != v.q_dtype:
        options["kv_data_type"] = DTYPES[v.kv_dtype]
    if v.op == "prefill":
        options["causal"] = v.causal
    if v.window:
        options["window_left"] = rng.choice([0, 1, 63, 64, 100, 500])
    if v.soft_cap:
        options["logits_soft_cap"] = rng.choice([1.5, 8.0, 30.0])
    if v.sinks:
        sinks = [rng.gauss(0, 3) for _ in range(num_qo_heads)]
        options["sinks"] = torch.tensor(sinks, device=device)
    return options | draw_criterion(v, rng, batch_size, device)


def draw_criterion(v: Variant, rng: random.Random, batch_size: int, device: str) -> dict[str, Any]:
    """Draw what decides over tiles, where the kernel decides."""
    if v.skip == "dense":
        return {}
    options: dict[str, Any] = {"vote_kv": v.vote_kv}
    if v.op == "prefill":
        options["order"] = v.order
    if v.skip == "measure":
        return {**options, "skip_criterion": "measure"}
    options |= {"collect_stats": v.stats, "collect_bound": v.bound}
    if v.skip == "budget":
        budget = rng.choice([1e-6, 1e-3, 0.02, 0.3, 1.0])
        return {**options, "skip_criterion": "budget", "skip_budget": budget}
    return options | draw_threshold(rng, batch_size, device)


def draw_threshold(rng: random.Random, batch_size: int, device: str) -> dict[str, Any]:
    """Draw a threshold or a factor, as a number or as a tensor that the kernel reads."""
    live = rng.random() < 0.5
    if rng.random() < 0.5:
        values = [rng.choice(THRESHOLDS) for _ in range(batch_size)]
        value: Any = torch.tensor(values, device=device) if live else rng.choice(THRESHOLDS)
        return {"skip_softmax_threshold": value}
    factors = [rng.choice([0.0, 10 ** rng.uniform(-1, 2.5)]) for _ in range(batch_size)]
    factor: Any = torch.tensor(factors, device=device) if live else 10 ** rng.uniform(-1, 2.5)
    options = {
        "skip_softmax_threshold_scale_factor": factor,
        "length_exponent": rng.choice([1.0, 1.0, 0.5, 2.0]),
        "overflow": rng.choice(["dense", "clamp"]),
    }
    if rng.random() < 0.5:
        lengths = [rng.randint(0, 5000) for _ in range(batch_size)]
        options["threshold_kv_len"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return options


def _show(options: dict[str, Any]) -> str:
    """Options in one line."""
    shown = {n: x.tolist() if isinstance(x, Tensor) else x for n, x in options.items()}
    return " ".join(f"{name}={value}" for name, value in shown.items())

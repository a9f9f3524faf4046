"""Random calls of both wrappers on the CPU path, decided by the oracle and by a plain softmax.

A failing example prints what it drew and a `@reproduce_failure` line. Runs are the same each time;
`FUZZ_EXAMPLES=1000 pytest tests/test_fuzz.py` tries that many others of each, with a random seed.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reported import ref64
from torch import Tensor

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import flashskip
from flashskip import reference
from flashskip._options import PlanOptions
from flashskip.geometry import ORDERS

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-12}
EDGES = st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 193])
LENGTH = EDGES | st.integers(0, 300)
# Of a prefill, around the length from which on few queries are judged against a seed.
FEW = st.tuples(st.integers(1, 66), st.integers(-1, 1)).map(lambda x: (x[0], 8 * x[0] + x[1]))
LENGTHS = st.lists(st.tuples(LENGTH, LENGTH) | FEW, max_size=4)


def examples(count: int) -> Any:
    """Return settings of `count` examples, always the same, or of what the environment asks for."""
    return settings(**COMMON, max_examples=EXAMPLES or count, derandomize=not EXAMPLES)


@dataclass
class Data:
    """What an example draws besides its tensors, and the generator of these."""

    draw: Any
    generator: torch.Generator
    dtype: torch.dtype
    heads: tuple[int, int]
    head_dim: int

    def normal(self, tokens: int, heads: int) -> torch.Tensor:
        """``[tokens, heads, dim]`` with gaps in some stride, surrounded by NaN."""
        gap = self.draw(st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from([0, 8])))
        shape = (tokens + gap[0], heads + gap[1], self.head_dim + gap[2])
        wide = torch.full(shape, math.nan, dtype=self.dtype)
        view = wide[gap[0] :, gap[1] :, : self.head_dim]
        view.copy_(torch.randn(view.shape, generator=self.generator) * self.scale)
        return view

    scale: float = 1.0

    def options(self, batch_size: int, prefill: bool) -> dict[str, Any]:
        """Draw the options of `plan()` that have an effect together."""
        draw = self.draw
        options: dict[str, Any] = {"q_data_type": self.dtype}
        if prefill:
            options["causal"] = draw(st.booleans())
        options["window_left"] = draw(st.sampled_from([-1, -1, 0, 1, 63, 64, 100]))
        options["sm_scale"] = draw(st.none() | st.sampled_from([0.01, 0.1, 0.5]))
        options["logits_soft_cap"] = draw(st.sampled_from([None, None, 0.0, 1.5, 30.0]))
        if draw(st.booleans()):
            options["sinks"] = torch.randn(self.heads[0], generator=self.generator)
        source = draw(st.sampled_from(["none", "threshold", "live", "factor", "live factor"]))
        if source == "none":
            return options
        live = source.startswith("live")
        factor = source.endswith("factor")
        values = draw(
            st.lists(
                st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.5, 0.99, 1.0]),
                min_size=max(batch_size, 1),
                max_size=max(batch_size, 1),
            )
        )
        scaled = torch.tensor(values[:batch_size]) * (200 if factor else 1)
        name = "skip_softmax_threshold" + ("_scale_factor" if factor else "")
        options[name] = scaled if live else values[0] * (200 if factor else 1)
        if factor:
            options["length_exponent"] = draw(st.sampled_from([1.0, 0.5, 2.0]))
            options["overflow"] = draw(st.sampled_from(["dense", "clamp"]))
            if draw(st.booleans()):
                lengths = draw(
                    st.lists(st.integers(0, 500), min_size=batch_size, max_size=batch_size)
                )
                options["threshold_kv_len"] = torch.tensor(lengths, dtype=torch.int32)
        if prefill:
            options["order"] = draw(st.sampled_from(ORDERS))
            options["vote_kv"] = draw(st.sampled_from([None, 64, 128]))
        options["collect_stats"] = options["collect_bound"] = True
        return options


@st.composite
def batches(draw: Any) -> Data:
    """Draw what all tensors of an example share."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 7]))
    data = Data(
        draw,
        torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
        draw(DTYPES),
        (kv_heads * group, kv_heads),
        draw(st.sampled_from([8, 64, 128])),
    )
    data.scale = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return data


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def oracle(wrapper: Any, q: Any, k: Any, v: Any, qo: Any, kv: Any, options: dict[str, Any]) -> Any:
    """Return the reference in float64, from the contract's options."""
    thresholds = None
    factor = options.get("skip_softmax_threshold_scale_factor")
    threshold = options.get("skip_softmax_threshold")
    if factor is not None:
        thresholds = reference.final_thresholds(
            kv.diff(), scale_factor=factor, length_exponent=options["length_exponent"],
            threshold_kv_len=options.get("threshold_kv_len"), overflow=options["overflow"],
        )  # fmt: skip
    elif threshold is not None:
        thresholds = reference.final_thresholds(kv.diff(), threshold=threshold)
    return reference.attention(
        q, k, v, qo_indptr=qo, kv_indptr=kv, geometry=wrapper.geometry,
        sm_scale=options["sm_scale"], logits_soft_cap=options["logits_soft_cap"],
        sinks=options.get("sinks"), thresholds=thresholds,
    )  # fmt: skip


def check(
    wrapper: Any, answer: Any, exact: Any, spans: list[tuple[slice, slice]], options: dict[str, Any]
) -> None:
    """Compare with the oracle, except where a decision is within rounding of flipping."""
    skips = "collect_stats" in options
    out, lse, *bound = answer
    for i, (qo, _) in enumerate(spans):
        margin = exact.skip_map[i].margin.abs()
        if (margin < 1e-3).any():
            continue
        expected = exact.out[qo]
        torch.testing.assert_close(
            out[qo].double(), expected, rtol=ULP[out.dtype], atol=ULP[out.dtype] * 0.1
        )
        torch.testing.assert_close(lse[qo].double(), exact.lse[qo], rtol=1e-5, atol=1e-4)
        if skips:
            assert torch.equal(wrapper.stats[i], exact.counts[i])
            torch.testing.assert_close(bound[0][qo].double(), exact.bound[qo], rtol=1e-2, atol=1e-6)


def check_plain(
    answer: Any, requests: list[Any], spans: Any, options: dict[str, Any], causal: bool
) -> None:
    """Where nothing is skipped or masked beyond causality, compare with a softmax of its own."""
    plain = "collect_stats" not in options and options["window_left"] < 0
    if not plain or options["logits_soft_cap"] or options.get("sinks") is not None:
        return
    for request, (qo, _) in zip(requests, spans, strict=True):
        expected, lse = ref64(request, causal, options["sm_scale"])
        torch.testing.assert_close(
            answer[0][qo].double(),
            expected,
            rtol=ULP[answer[0].dtype],
            atol=ULP[answer[0].dtype] * 0.1,
        )
        torch.testing.assert_close(answer[1][qo].double() * math.log(2), lse, rtol=1e-5, atol=1e-4)


@examples(60)
@given(batches(), LENGTHS, st.data())
def test_prefill(data: Data, lengths: list[tuple[int, int]], more: Any) -> None:
    data.draw = more.draw
    qo_lens, kv_lens = [a for a, _ in lengths], [b for _, b in lengths]
    qo, kv = starts(qo_lens), starts(kv_lens)
    spare = more.draw(st.integers(0, 3))  # rows past the last request
    q = data.normal(int(qo[-1]) + spare, data.heads[0])
    k, v = (data.normal(int(kv[-1]) + spare, data.heads[1]) for _ in range(2))
    for t, end in ((q, qo), (k, kv), (v, kv)):
        t[int(end[-1]) :] = math.nan
    options = data.options(len(lengths), prefill=True)
    note(f"{lengths} {data.dtype} {data.heads} {data.head_dim} {options}")
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(qo, kv, *data.heads, data.head_dim, **options)
    out = torch.full(q.shape, math.nan, dtype=data.dtype)
    answer = wrapper.run(q, k, v, out=out, return_lse=True)
    assert out[int(qo[-1]) :].isnan().all()
    spans = [
        (slice(*qo[i : i + 2].tolist()), slice(*kv[i : i + 2].tolist()))
        for i in range(len(lengths))
    ]
    check(wrapper, answer, oracle(wrapper, q, k, v, qo, kv, options), spans, options)
    requests = [(q[a], k[b], v[b]) for a, b in spans]
    check_plain(answer, requests, spans, options, options["causal"])
    again = wrapper.run(q, k, v, return_lse=True)
    assert torch.equal(again[0][: int(qo[-1])], out[: int(qo[-1])])


@dataclass
class Pages:
    """A drawn page table and cache; `given` is what `run` takes."""

    page_size: int
    layout: str
    table: tuple[Tensor, Tensor, Tensor]
    cache: Tensor
    given: Any


def draw_pages(data: Data, lengths: list[int]) -> Pages:
    """Any page may serve several requests, and the table may be longer than what is used."""
    draw, page_size = data.draw, data.draw(st.sampled_from([1, 2, 3, 16, 64, 100]))
    layout, paired = draw(st.sampled_from(["NHD", "HND"])), draw(st.booleans())
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + draw(st.integers(0, 3))
    ids = (
        draw(st.permutations(range(pages)))[: sum(counts)]
        if draw(st.booleans())
        else [draw(st.integers(0, pages - 1)) for _ in range(sum(counts))]
    )
    indices = torch.tensor([*ids, *[2**30] * draw(st.integers(0, 2))], dtype=torch.int32)
    last = torch.tensor([(n - 1) % page_size + 1 if n else -7 for n in lengths], dtype=torch.int32)
    inner = (page_size, data.heads[1]) if layout == "NHD" else (data.heads[1], page_size)
    cache = torch.randn(pages, 2, *inner, data.head_dim, generator=data.generator).to(data.dtype)
    given = (cache[:, 0], cache[:, 1]) if paired else cache
    return Pages(page_size, layout, (starts(counts), indices, last), cache, given)


def check_pages(
    wrapper: Any, q: Tensor, qo: Tensor, pages: Pages, options: dict[str, Any], causal: bool
) -> None:
    """Run a planned wrapper on pages and compare as a ragged batch."""
    answer = wrapper.run(q, pages.given, return_lse=True)
    k, v, kv = reference.gather_pages(pages.cache, *pages.table, pages.layout)
    exact = oracle(wrapper, q, k, v, qo, kv, options)
    spans = [
        (slice(*qo[i : i + 2].tolist()), slice(*kv[i : i + 2].tolist())) for i in range(len(qo) - 1)
    ]
    check(wrapper, answer, exact, spans, options)
    check_plain(answer, [(q[a], k[b], v[b]) for a, b in spans], spans, options, causal)
    again = wrapper.run(q, pages.given, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(answer, again, strict=True))


@examples(60)
@given(batches(), st.lists(LENGTH, max_size=4), st.data())
def test_decode(data: Data, lengths: list[int], more: Any) -> None:
    data.draw = more.draw
    q_len = data.draw(st.sampled_from([1, 1, 2, 5]))
    pages = draw_pages(data, lengths)
    q = data.normal(len(lengths) * q_len, data.heads[0])
    options = data.options(len(lengths), prefill=False)
    note(f"{lengths} {pages.page_size=} {q_len=} {data.dtype} {data.heads} {options}")
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0), pages.layout)
    shape = (*data.heads, data.head_dim, pages.page_size)
    wrapper.plan(*pages.table, *shape, q_len_per_req=q_len, **options)
    check_pages(wrapper, q, starts([q_len] * len(lengths)), pages, options, causal=True)


@examples(40)
@given(batches(), LENGTHS, st.data())
def test_paged_prefill(data: Data, lengths: list[tuple[int, int]], more: Any) -> None:
    data.draw = more.draw
    qo = starts([a for a, _ in lengths])
    pages = draw_pages(data, [b for _, b in lengths])
    q = data.normal(int(qo[-1]), data.heads[0])
    options = data.options(len(lengths), prefill=True)
    note(f"{lengths} {pages.page_size=} {data.dtype} {data.heads} {options}")
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0), pages.layout)
    shape = (*data.heads, data.head_dim, pages.page_size)
    wrapper.plan_paged(qo, *pages.table, *shape, **options)
    check_pages(wrapper, q, qo, pages, options, options["causal"])


# ---- arguments: right results, or an error that says what is wrong -------------------------------


TENSORS = [torch.empty(0), torch.zeros(2), torch.zeros(()), torch.zeros(2, 8, 64)]
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([torch.float64, torch.int8, torch.bfloat16, [], [0, 1]]),
    st.sampled_from([*TENSORS, torch.zeros(2, dtype=torch.int32)]),
)
SHAPE = ["qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"]
PLAN = [*SHAPE, *(f.name for f in dataclasses.fields(PlanOptions)), "nonsense"]
RUN = ["q", "k", "v", "out", "lse", "return_lse", "lse_base"]


def is_expected(error: Exception) -> bool:
    """Whether a check raised an error: it says what is expected, or names a keyword."""
    return (
        "expected" in str(error) or "supported:" in str(error) or "unexpected keyword" in str(error)
    )


def attempt(call: Callable[[], Any]) -> Tensor | None:
    """Return the output, or None after an error that a check raised."""
    error = None
    try:
        answer = call()
    except (ValueError, TypeError) as raised:
        error = raised
    if error is not None:
        assert is_expected(error), repr(error)
        return None
    return answer[0] if isinstance(answer, tuple) else answer


def judge(call: Callable[[], Any]) -> None:
    """Arguments are refused by name, or the call gives a whole answer for two tokens."""
    out = attempt(call)
    if out is not None:
        assert out.shape == (2, 4, 64)
        assert out.isfinite().all()


def normal_tensors(*heads: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 64, generator=g).bfloat16() for n in heads]


@examples(250)
@given(st.dictionaries(st.sampled_from(PLAN + RUN), ODD, min_size=1, max_size=3))
def test_arguments_of_prefill(changed: dict[str, Any]) -> None:
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    plan = {
        "qo_indptr": indptr, "kv_indptr": indptr, "num_qo_heads": 4, "num_kv_heads": 2,
        "head_dim_qk": 64, "q_data_type": torch.bfloat16,
        **{n: x for n, x in changed.items() if n not in RUN},
    }  # fmt: skip
    run = dict(zip("qkv", normal_tensors(4, 2, 2), strict=True))
    run |= {n: x for n, x in changed.items() if n in RUN}

    def call() -> Any:
        wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
        wrapper.plan(**plan)
        return wrapper.run(**run)

    judge(call)


TABLE = ["indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"]
DECODE_PLAN = [*TABLE, "page_size", "q_len_per_req", *PLAN[len(SHAPE) :]]
DECODE_RUN = ["q", "paged_kv_cache", "k_scale", "v_scale", *RUN[3:]]


@examples(250)
@given(st.dictionaries(st.sampled_from(DECODE_PLAN + DECODE_RUN), ODD, min_size=1, max_size=3))
def test_arguments_of_decode(changed: dict[str, Any]) -> None:
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [1, 0], [2, 1])]
    plan = {
        **dict(zip(TABLE, [*ints, 4, 2, 64], strict=True)),
        "page_size": 2, "q_data_type": torch.bfloat16,
        **{n: x for n, x in changed.items() if n not in DECODE_RUN},
    }  # fmt: skip
    q, *cache = normal_tensors(4, 8, 8)
    run = {"q": q, "paged_kv_cache": torch.stack([t.view(2, 2, 4, 64)[:, :, :2] for t in cache], 1)}
    run |= {n: x for n, x in changed.items() if n in DECODE_RUN}

    def call() -> Any:
        wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
        wrapper.plan(**plan)
        return wrapper.run(**run)

    judge(call)

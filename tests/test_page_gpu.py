"""On a GPU: appending to pages, and decode on pages that lie far into a large cache."""

from __future__ import annotations

from typing import Any

import paged
import pytest
import torch
from paged import FP8, LAMBDA, make_paged
from torch import Tensor

import flashskip

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16 = torch.bfloat16

# Requests of 5 tokens, none and 4, with pages of 4.
TABLE = ((0, 2, 2, 3), (4, 1, 3), (1, 3, 4))


def table(device: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in TABLE)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_appending_waits_for_nothing_and_follows_the_table_in_a_graph(
    layout: str, dtype: torch.dtype
) -> None:
    shape = (6, 2, 4, 3, 8) if layout == "NHD" else (6, 2, 3, 4, 8)
    k, v = torch.randn(2, 6, 3, 8).to(dtype)
    cache, expected = torch.zeros(2, *shape).to(dtype).unbind()
    cache, on_gpu, lengths = cache.to(DEVICE), (k.to(DEVICE), v.to(DEVICE)), table(DEVICE)

    def append() -> None:
        flashskip.append_paged_kv_cache(*on_gpu, cache, *lengths, kv_layout=layout)

    append()  # what torch compiles and allocates at first use
    cache.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        append()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    flashskip.append_paged_kv_cache(k, v, expected, *table("cpu"), kv_layout=layout)
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append()
    for t, new in zip(lengths, ((0, 1, 3, 3), (2, 0, 5), (3, 2, 1)), strict=True):
        t.copy_(torch.tensor(new, dtype=torch.int32))
    cache.zero_(), expected.zero_()
    graph.replay()
    moved = tuple(t.cpu() for t in lengths)
    flashskip.append_paged_kv_cache(k, v, expected, *moved, kv_layout=layout)
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert expected.view(torch.uint8).any()


STATS: dict[str, Any] = {"skip_softmax_threshold": LAMBDA, "collect_stats": True}
DTYPES = {"bf16": BF16, "fp8": FP8}


@pytest.mark.variants(
    lambda page_size, kind, skips: [
        paged.variant(4, 128, page_size, kv_data_type=DTYPES[kind], **(STATS if skips else {}))
    ]
)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 5])
def test_pages_beyond_31_bits(page_size: int, layout: str, kind: str, skips: bool) -> None:
    """The same pages near and far, K and V of all of them random: equal bit for bit."""
    dtype = DTYPES[kind]
    near = make_paged((700, 64, 1, 300), 8, 2, 128, page_size, kv_dtype=dtype, layout=layout)
    far = 2**31 // (2 * 128 * page_size) + 1000  # of K alone
    pages = len(near.k)
    large = [
        torch.zeros((far + pages, *t.shape[1:]), dtype=dtype, device=DEVICE)
        for t in (near.k, near.v)
    ]
    if layout == "HND":
        large = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in large]
    for whole, t in zip(large, (near.k, near.v), strict=True):
        whole[far:].view(torch.uint8).copy_(t.contiguous().view(torch.uint8))
    results = []
    for (k, v), first in (((near.k, near.v), 0), (large, far)):
        cache = (k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))
        wrapper = flashskip.BatchDecodeWrapper(kv_layout=layout)
        wrapper.plan(
            *(near.indptr, near.indices + first, near.last_page_len, 8, 2, 128, page_size),
            q_data_type=BF16,
            kv_data_type=dtype,
            **(STATS if skips else {}),
        )
        out, lse = wrapper.run(near.q, cache, return_lse=True, **near.scales)
        results.append((out, lse, *([wrapper.stats] if skips else [])))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    assert results[0][0].any()
    if skips:
        assert results[0][2][..., 0].any()

"""Measuring, bound and budget on a paged cache: what the ragged kernels say of the same keys."""

from __future__ import annotations

from typing import Any

import prefill_gpu
import pytest
import torch
from helpers import HeadDim, make_ragged
from paged import to_pages
from prefill_gpu import BF16, DEVICE, LONG
from test_prefill_paged_gpu import plan_pages

from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

CRITERIA: dict[str, dict[str, Any]] = {
    "measure": {"skip_criterion": "measure"},
    "measure by 128 keys": {"skip_criterion": "measure", "vote_kv": 128},
    "bound": {"skip_softmax_threshold": 0.02, "collect_bound": True, "collect_stats": True},
    "budget": {"skip_criterion": "budget", "skip_budget": 0.05, "collect_stats": True},
}
CACHES: tuple[tuple[str, HeadDim, int], ...] = (
    *((criterion, 128, 16) for criterion in CRITERIA),
    *((criterion, (192, 128), 16) for criterion in CRITERIA),
    *((criterion, 128, 3) for criterion in CRITERIA),
    ("budget", 64, 1),
    ("budget", 256, 5),
)


def kernels(criterion: str, head_dim: HeadDim, page_size: int) -> list[Variant]:
    options = {"causal": True, **CRITERIA[criterion]}
    return [prefill_gpu.variant(head_dim, BF16, size, **options) for size in (0, page_size)]


@pytest.mark.variants(
    lambda criterion, head_dim, page_size: kernels(criterion, head_dim, page_size)
)
@pytest.mark.parametrize(("criterion", "head_dim", "page_size"), CACHES)
def test_pages_change_nothing(criterion: str, head_dim: HeadDim, page_size: int) -> None:
    batch = make_ragged(*LONG, 4, 2, head_dim, device=DEVICE, hot=0.3, gain=8.0)
    pages = to_pages(batch, page_size, "NHD", "pair")
    options = {"causal": True, **CRITERIA[criterion]}
    ragged = prefill_gpu.plan(batch, **options)
    paged = plan_pages(batch, pages, **options)
    expected = ragged.run(batch.q, batch.k, batch.v, return_lse=True)
    found = paged.run(batch.q, pages.cache, return_lse=True)
    for actual, wanted in zip(found, expected, strict=True):  # output, LSE, bound
        assert torch.equal(actual, wanted)
    counter = "gaps" if "measure" in criterion else "stats"
    assert torch.equal(getattr(paged, counter), getattr(ragged, counter))
    assert getattr(paged, counter).any()

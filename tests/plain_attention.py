"""Plain attention to compare with, and inputs on which tiles can be skipped."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashskip.geometry import Geometry, RequestGeometry
from flashskip.reference import Result, attention

LOG2_E = math.log2(math.e)
INF = math.inf


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of scores [heads, rows, keys] in float64; rows without keys give NaN."""
    lse = torch.logsumexp(s, -1)
    return torch.softmax(s, -1) @ v, lse * LOG2_E


def plain_scores(
    q: Tensor, k: Tensor, sm_scale: float, geometry: RequestGeometry, soft_cap: float | None = None
) -> Tensor:
    """Masked scores [heads, tokens, keys] in natural-log units, from the contract's words."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q.double(), k) * sm_scale
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    limit = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    if geometry.causal:
        s = s.masked_fill(key > limit, -INF)
    if geometry.window_left >= 0:
        s = s.masked_fill(key < limit - geometry.window_left, -INF)
    return s


def one_request(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, **options: object) -> Result:
    return attention(
        q, k, v, qo_indptr=[0, len(q)], kv_indptr=[0, len(k)], geometry=geometry, **options
    )


def random_qkv(
    seed: int,
    qo_len: int,
    kv_len: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 8),
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that drift, so that nearby keys matter most and many tiles can be skipped."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drift = normal(max(qo_len, kv_len), heads[1], dims[0]).cumsum(0)
    k = normal(kv_len, heads[1], dims[0]) + drift[len(drift) - kv_len :]
    drift = drift[len(drift) - qo_len :].repeat_interleave(heads[0] // heads[1], 1)
    q = normal(qo_len, heads[0], dims[0]) + drift * 0.3
    return q, k, normal(kv_len, heads[1], dims[1])

"""Correctness before time: a sample of output rows against plain softmax attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.data import DECODE_TILE, PREFILL_TILE, Data, DecodeData, PrefillData

# Of a row's norm: rounding of P and of the output to 16 bits lies at 2 to 4e-3.
_ROUNDING = {"bfloat16": 1e-2, "float16": 3e-3}
_ROWS = 16  # of each request that is looked at


def check_output(
    case: Case,
    data: Data,
    out: Tensor,
    *,
    skips: bool,
    paged: bool,
    rounding: float | None = None,
) -> dict[str, float]:
    """Return the worst relative error of the sampled rows, and what it may be.

    `rounding` is for a contestant that computes in a type of its own.

    A contestant that skips may leave out the softmax mass of the cold tiles (about 1e-4 or less),
    measured here in float64, and nothing else.
    """
    if isinstance(case, PrefillCase):
        assert isinstance(data, PrefillData)
        pairs = _prefill_samples(case, data, out)
    else:
        assert isinstance(case, DecodeCase)
        assert isinstance(data, DecodeData)
        pairs = _decode_samples(case, data, out, paged)
    error, cold_mass = 0.0, 0.0
    for found, expected, mass in pairs:
        difference = (found.double() - expected).flatten(1).norm(dim=1)
        worst = (difference / expected.flatten(1).norm(dim=1)).max().item()
        error = max(error, worst) if worst == worst else float("inf")  # NaN never passes
        cold_mass = max(cold_mass, mass)
    tolerance = _ROUNDING[case.dtype] if rounding is None else rounding
    tolerance += 4 * cold_mass if skips else 0.0
    return {"error": error, "tolerance": tolerance}


def _prefill_samples(case: PrefillCase, data: PrefillData, out: Tensor) -> list:
    samples = []
    qo_starts, kv_starts = data.qo_indptr.tolist(), data.kv_indptr.tolist()
    for request in sorted({0, len(case.qo_lens) - 1}):
        qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
        draw = torch.randint(0, qo_len, (_ROWS - 2,), generator=torch.Generator().manual_seed(1))
        rows = torch.cat([draw, torch.tensor([0, qo_len - 1])]).to(out.device)
        last_key = rows + kv_len - qo_len if case.causal else torch.full_like(rows, kv_len - 1)
        keys = slice(kv_starts[request], kv_starts[request] + kv_len)
        at = qo_starts[request] + rows
        expected, mass = _attention(
            data.q[at], data.k[keys], data.v[keys], last_key, data.cold[request], PREFILL_TILE
        )
        samples.append((out[at], expected, mass))
    return samples


def _decode_samples(case: DecodeCase, data: DecodeData, out: Tensor, paged: bool) -> list:
    samples = []
    pages_per_request = data.page_table.shape[1]
    for request in sorted({0, case.batch_size // 2, case.batch_size - 1}):
        pages = data.page_table[request]
        if (
            not paged
        ):  # in the order of storage; then cold tiles lie anywhere, and nothing is skipped
            pages = torch.arange(pages_per_request, device=out.device) + request * pages_per_request
        k, v = (_take(x, pages).flatten(0, 1)[: case.kv_len] for x in (data.k, data.v))
        last_key = torch.tensor([case.kv_len - 1], device=out.device)
        q = data.q[request : request + 1]
        expected, mass = _attention(q, k, v, last_key, data.cold[request], DECODE_TILE)
        samples.append((out[request : request + 1], expected, mass))
    return samples


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Index the first dimension; an 8-bit float type, which has no such kernel, as bytes."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.itemsize == 1 else x[rows]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, cold: Tensor, tile: int
) -> tuple[Tensor, float]:
    """Return attention of rows ``[rows, heads, dim]`` and the largest mass of cold tiles."""
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    hidden = torch.arange(k.shape[0], device=k.device) > last_key[:, None]
    outputs, mass = [], 0.0
    for h in range(kv_heads):
        group = q[:, h * heads // kv_heads : (h + 1) * heads // kv_heads].double()
        scores = torch.einsum("rgd,kd->rgk", group, k[:, h].double()) / dim**0.5
        p = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(-1)
        outputs.append(p @ v[:, h].double())
        is_cold = cold[h].repeat_interleave(tile)[: k.shape[0]]
        mass = max(mass, (p * is_cold).sum(-1).max().item())
    return torch.cat(outputs, 1), mass

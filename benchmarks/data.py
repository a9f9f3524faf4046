"""Inputs with a set share of negligible tiles.

Every query of a KV head's group and the keys of its *hot* tiles have a part along one random unit
direction, so that a hot score lies `MARGIN` above what it would be in a *cold* tile; all else is
unit noise. Cold tiles then hold about exp(-MARGIN) of a hot tile's softmax mass and fall far below
`THRESHOLD`, hot ones never do. Tile 0 is hot, so that what the others are judged against is high
from the start. Values are random throughout: a GPU runs faster on zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case, DecodeCase, PrefillCase
from flashskip.geometry import Geometry

MARGIN = 12.0  # nats
THRESHOLD = 1e-3  # lambda: 6.9 nats, between the noise of a tile (< 4) and the margin less noise
PREFILL_TILE = 128  # keys that are hot or cold together: a multiple of every vote
DECODE_TILE = 64
# Keys of the tiles on the diagonal that a causal unit of rows visits on average: half a row block,
# a load tile, and what a unit sees of its last tiles. They are visited before the hot tile 0 and
# mostly computed, so there must be more cold tiles for the share of all to come out as asked. Where
# a seed judges, they are skipped as any other.
DIAGONAL_KEYS = 192
_CHUNK = 1 << 27  # elements of the noise that exists in float32 at a time


@dataclass
class Pages:
    """k, v ``[pages, page_size, num_kv_heads, head_dim]`` and the page table, on the device."""

    k: Tensor
    v: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass
class PrefillData:
    """q, k, v ``[nnz, heads, head_dim]`` and the index pointers, on the device."""

    q: Tensor
    k: Tensor
    v: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    cold: list[Tensor]  # of each request: bool [num_kv_heads, tiles]
    pages: Pages | None = None  # the same K and V in shuffled pages, where the case asks for them


@dataclass
class DecodeData:
    """q ``[batch_size, heads, head_dim]``; k, v ``[pages, page_size, num_kv_heads, head_dim]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_table: Tensor  # [batch_size, pages of a request]: a shuffle of all pages
    cold: Tensor  # bool [batch_size, num_kv_heads, tiles]


Data = PrefillData | DecodeData


def make_data(case: Case, share: float, device: torch.device, seed: int = 0) -> Data:
    """Make the inputs of a case, `share` of whose visited tiles can be skipped."""
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(case, PrefillCase):
        return _prefill_data(case, share, generator)
    return _decode_data(case, share, generator)


def _prefill_data(case: PrefillCase, share: float, g: torch.Generator) -> PrefillData:
    direction = _directions(case.num_kv_heads, case.head_dim_qk, g)
    lift = _lift(case.head_dim_qk)
    cold, hot_of_key = [], []
    for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
        tiles = -(-kv_len // PREFILL_TILE)
        seeded = Geometry.prefill().of(qo_len, kv_len).judged_against == "seed"
        lost = DIAGONAL_KEYS if case.causal and not seeded else 0
        seen = kv_len - qo_len / 2 if case.causal else kv_len
        asked = torch.tensor(share * seen / max(seen - lost, 1.0), device=g.device)
        cold.append(_cold_tiles((case.num_kv_heads,), tiles, asked, g))
        hot_of_key.append(~cold[-1].repeat_interleave(PREFILL_TILE, 1)[:, :kv_len])
    group = case.num_qo_heads // case.num_kv_heads
    q = _rows(sum(case.qo_lens), direction.repeat_interleave(group, 0), lift, case.dtype, g)
    k = _rows(sum(case.kv_lens), direction, lift, case.dtype, g, torch.cat(hot_of_key, 1).t())
    v = _noise((sum(case.kv_lens), case.num_kv_heads, case.head_dim_vo), case.dtype, g)
    pages = _into_pages(k, v, case.kv_lens, case.page_size, g) if case.page_size else None
    indptrs = (_indptr(lens, g.device) for lens in (case.qo_lens, case.kv_lens))
    return PrefillData(q, k, v, *indptrs, cold, pages)


def _into_pages(
    k: Tensor, v: Tensor, kv_lens: tuple[int, ...], page_size: int, g: torch.Generator
) -> Pages:
    """Copy ragged K and V into the pages of a cache, in random order."""
    counts = tuple(-(-n // page_size) for n in kv_lens)
    indices = torch.randperm(sum(counts), generator=g, device=g.device)
    slots, first = [], 0
    for kv_len, count in zip(kv_lens, counts, strict=True):
        token = torch.arange(kv_len, device=g.device)
        page = indices[first + token // page_size]
        slots.append(page * page_size + token % page_size)
        first += count
    slot = torch.cat(slots)
    caches = []
    for x in (k, v):
        cache = x.new_zeros(sum(counts) * page_size, *x.shape[1:])
        cache[slot] = x
        caches.append(cache.unflatten(0, (-1, page_size)))
    last = [n - (count - 1) * page_size for n, count in zip(kv_lens, counts, strict=True)]
    return Pages(
        *caches,
        indptr=_indptr(counts, g.device),
        indices=indices.int(),
        last_page_len=torch.tensor(last, dtype=torch.int32, device=g.device),
    )


def _decode_data(case: DecodeCase, share: float, g: torch.Generator) -> DecodeData:
    device = g.device
    per_request = -(-case.kv_len // case.page_size)
    pages = case.batch_size * per_request
    tiles = -(-case.kv_len // DECODE_TILE)
    shares = torch.full((case.num_kv_heads,), share, device=device)
    if case.uneven:
        order = torch.randperm(case.num_kv_heads, generator=g, device=device)
        shares = torch.linspace(0, 2 * share, case.num_kv_heads, device=device)[order]
    cold = _cold_tiles((case.batch_size, case.num_kv_heads), tiles, shares, g)
    page_table = torch.randperm(pages, generator=g, device=device).view(case.batch_size, -1)
    # Which request and which of its tiles each slot of the cache belongs to.
    owner = torch.empty(pages, dtype=torch.long, device=device)
    owner[page_table.flatten()] = torch.arange(pages, device=device)
    slot = torch.arange(case.page_size, device=device)
    tile = ((owner % per_request)[:, None] * case.page_size + slot) // DECODE_TILE
    hot = ~cold[(owner // per_request)[:, None], :, tile.clamp(max=tiles - 1)]

    direction, lift = _directions(case.num_kv_heads, case.head_dim, g), _lift(case.head_dim)
    group = case.num_qo_heads // case.num_kv_heads
    slots = pages * case.page_size
    shape = (pages, case.page_size, case.num_kv_heads, case.head_dim)
    hot = hot.reshape(slots, case.num_kv_heads)
    last = case.kv_len - (per_request - 1) * case.page_size
    return DecodeData(
        q=_rows(case.batch_size, direction.repeat_interleave(group, 0), lift, case.dtype, g),
        k=_rows(slots, direction, lift, case.cache_dtype, g, hot).view(shape),
        v=_noise(shape, case.cache_dtype, g),
        indptr=_indptr((per_request,) * case.batch_size, device),
        indices=page_table.flatten().int(),
        last_page_len=torch.full((case.batch_size,), last, dtype=torch.int32, device=device),
        page_table=page_table,
        cold=cold,
    )


def _lift(head_dim: int) -> float:
    """Return the length along the direction whose square makes `MARGIN` of a scaled score."""
    return math.sqrt(MARGIN * math.sqrt(head_dim))


def _directions(heads: int, head_dim: int, g: torch.Generator) -> Tensor:
    """Return one unit vector of entries ±1/sqrt(head_dim) per head."""
    signs = torch.randint(0, 2, (heads, head_dim), generator=g, device=g.device)
    return (signs.float() * 2 - 1) / math.sqrt(head_dim)


def _cold_tiles(lead: tuple[int, ...], tiles: int, shares: Tensor, g: torch.Generator) -> Tensor:
    """Return which of the tiles are cold: the asked share, of all or of each head, never tile 0."""
    count = (shares * tiles).round().clamp(max=tiles - 1)
    draw = torch.rand(*lead, tiles - 1, generator=g, device=g.device)
    cold = draw.argsort(-1).argsort(-1) < count[..., None]
    return torch.nn.functional.pad(cold, (1, 0))


def _rows(
    rows: int,
    direction: Tensor,
    lift: float,
    dtype: str,
    g: torch.Generator,
    hot: Tensor | None = None,
) -> Tensor:
    """Return unit noise across each head's direction, and `lift` along it where `hot`."""
    heads, dim = direction.shape
    out = torch.empty(rows, heads, dim, dtype=getattr(torch, dtype), device=g.device)
    step = max(1, _CHUNK // (heads * dim))
    for start in range(0, rows, step):
        part = out[start : start + step]
        x = torch.randn(part.shape, generator=g, device=g.device)
        along = (x * direction).sum(-1)
        wanted = lift if hot is None else lift * hot[start : start + step]
        part.copy_(x + (wanted - along).unsqueeze(-1) * direction)
    return out


def _noise(shape: tuple[int, ...], dtype: str, g: torch.Generator) -> Tensor:
    wanted = getattr(torch, dtype)
    drawn = torch.float16 if wanted.itemsize == 1 else wanted  # an 8-bit type has no generator
    return torch.empty(shape, dtype=drawn, device=g.device).normal_(generator=g).to(wanted)


def _indptr(lens: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *lens)).cumsum(0)
    return ends.to(device=device, dtype=torch.int32)

"""Inputs and error budgets that the GPU tests of both kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashskip.geometry import RequestGeometry
from flashskip.reference import SkipMap
from flashskip.reference._rows import to_rows


@dataclass(frozen=True)
class Ragged:
    """A ragged batch: ``q [nnz_qo, num_qo_heads, dim]``, ``k, v [nnz_kv, num_kv_heads, dim]``.

    V may have another dim, which is the output's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Of the output."""
        return (*self.q.shape[:2], self.v.shape[2])

    def spans(self) -> list[tuple[slice, slice]]:
        """Query and key rows of each request."""
        qo, kv = self.qo_indptr.tolist(), self.kv_indptr.tolist()
        return [(slice(qo[i], qo[i + 1]), slice(kv[i], kv[i + 1])) for i in range(len(qo) - 1)]


def indptr(lengths: Sequence[int], device: str | torch.device) -> Tensor:
    """int32 ``[len(lengths) + 1]``: where each request starts."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return starts.to(device=device, dtype=torch.int32)


HeadDim = int | tuple[int, int]


def head_dims(head_dim: HeadDim) -> tuple[int, int]:
    """Channels of q and k, and of v and the output; one number for both."""
    return (head_dim, head_dim) if isinstance(head_dim, int) else head_dim


def make_ragged(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: HeadDim,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str | torch.device = "cuda",
    hot: float | None = None,
    gain: float = 16.0,
    seed: int = 0,
) -> Ragged:
    """Normal q, k, v. With `hot`, that share of the 64-key tiles draws all queries by `gain`²."""
    head_dim, head_dim_vo = head_dims(head_dim)
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    q = normal(sum(qo_lens), num_qo_heads, head_dim)
    k, v = normal(2, sum(kv_lens), num_kv_heads, head_dim).unbind()
    v = v[..., :head_dim_vo].contiguous()
    if hot is not None:
        direction = torch.nn.functional.normalize(normal(head_dim), dim=0) * gain
        tiles = [torch.rand(-(-n // 64), generator=g, device=device) < hot for n in kv_lens]
        rows = [t.repeat_interleave(64)[:n] for t, n in zip(tiles, kv_lens, strict=True)]
        q = q * 0.5 + direction
        k = k * 0.5 + torch.cat(rows)[:, None, None] * direction
    return Ragged(
        q.to(dtype), k.to(dtype), v.to(dtype), indptr(qo_lens, device), indptr(kv_lens, device)
    )


def poison(t: Tensor) -> Tensor:
    """Fill `t` with NaN and return it: what is not written stays visible."""
    return t.fill_(float("nan"))


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cuda"
) -> Tensor:
    """Return a new tensor of NaN."""
    return poison(torch.empty(tuple(shape), dtype=dtype, device=device))


def by_head(x: Tensor, geometry: RequestGeometry) -> Tensor:
    """From ``[sequences, rows, ...]``, rows token-major, to ``[num_qo_heads, qo_len, ...]``."""
    by_token = x.unflatten(1, (geometry.qo_len, geometry.heads_per_vote))
    return by_token.transpose(1, 2).flatten(0, 1)


def by_row(decisions: Tensor, geometry: RequestGeometry) -> Tensor:
    """From ``[sequences, units, ...]`` to ``[num_qo_heads, qo_len, ...]``: each row's own."""
    rows = decisions.repeat_interleave(geometry.rows_per_vote, 1)[:, : geometry.num_rows]
    return by_head(rows, geometry)


def show_tiles(batch: Ragged, vote_kv: int = 64) -> None:
    """Make V one-hot in the tile of each key: an output then tells which tiles were kept."""
    for _, kv in batch.spans():
        tile = torch.arange(kv.stop - kv.start, device=batch.v.device) // vote_kv
        one_hot = torch.nn.functional.one_hot(tile, batch.v.shape[2])
        batch.v[kv] = one_hot[:, None].to(batch.v.dtype)


def seen(out: Tensor, m: SkipMap) -> Tensor:
    """Tiles that V showed of a request: bool ``[sequences, units, tiles]``."""
    rows = to_rows(out, m.geometry)[..., : m.geometry.num_tiles] > 0
    units = m.geometry.num_units
    padded = torch.nn.functional.pad(rows, (0, 0, 0, units * 64 - rows.shape[1]))
    return padded.unflatten(1, (units, 64)).any(2)


def kept_keys(skip_map: SkipMap) -> Tensor:
    """Bool ``[num_qo_heads, qo_len, kv_len]``: keys that a row sees in a tile that is kept."""
    geometry = skip_map.geometry
    device = skip_map.state.device
    rows = [geometry.visible(row) for row in range(geometry.num_rows)]
    limits = torch.tensor([(keys.start, keys.stop) for keys in rows], device=device).view(-1, 2, 1)
    key = torch.arange(geometry.kv_len, device=device)
    visible = (limits[:, 0] <= key) & (key < limits[:, 1])
    kept = skip_map.kept.repeat_interleave(geometry.rows_per_vote, 1)[:, : geometry.num_rows]
    kept = kept.repeat_interleave(geometry.keys_per_vote, 2)[..., : geometry.kv_len]
    return by_head(visible & kept, geometry)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    sm_scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    *,
    p_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of one request as plain code in the tensors' own precision computes it.

    Scores and sums in fp32, probabilities relative to the row's maximum and rounded to `p_dtype`
    (that of `v`), output rounded to that of `q`. `kept` is bool ``[num_qo_heads, qo_len, kv_len]``.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, 1).permute(1, 2, 0)
    values = v.float().repeat_interleave(group, 1).transpose(0, 1)
    s = q.float().transpose(0, 1) @ keys * sm_scale
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    s = s.masked_fill(~kept, -torch.inf)
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - m)
    o = p.to(p_dtype or v.dtype).float() @ values / total
    return o.nan_to_num(0).transpose(0, 1).to(q.dtype)


def row_scale_ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at the largest magnitude of each row of `exact`."""
    largest = exact.abs().amax(-1).clamp_min(torch.finfo(dtype).tiny)
    return torch.exp2(torch.floor(torch.log2(largest))) * torch.finfo(dtype).eps


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, least: float = 0.0) -> None:
    """Assert that each row errs by at most twice what `eager` does, and one ulp at the row's scale.

    Parameters
    ----------
    actual : Tensor
        ``[..., dim]`` in the kernel's dtype.
    exact : Tensor
        The same in float64.
    eager : Tensor
        The same by `eager_attention`.
    least : float
        An error that is always granted: the spacing of subnormal numbers of a dtype that `actual`
        was rounded to before.
    """
    assert torch.isfinite(actual).all(), f"{(~torch.isfinite(actual)).sum()} values are not finite"
    error = (actual.double() - exact).abs().amax(-1)
    budget = (
        2 * (eager.double() - exact).abs().amax(-1) + row_scale_ulp(exact, actual.dtype) + least
    )
    worst = (error / budget).max().item() if error.numel() else 0.0
    assert worst <= 1, f"error is {worst:.2f} times the budget"

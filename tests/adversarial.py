"""Scores that tempt a criterion to omit too much, and what a row truly omits."""

from __future__ import annotations

import torch
from helpers import Ragged, by_row, indptr, kept_keys
from torch import Tensor

from flashskip.reference import SkipMap

PATTERNS = ("diffuse", "rising", "falling", "sawtooth", "one loud tile", "heavy tails")


def make_adversarial(
    pattern: str,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
) -> Ragged:
    """One request whose scores follow a pattern over its keys, with a little noise."""
    g = torch.Generator(device=device).manual_seed(0)
    qo_len, kv_len = lengths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    key = torch.arange(kv_len, device=device)
    tile = key // 64
    level = {
        "diffuse": torch.zeros(kv_len, device=device),
        "rising": key * (20 / kv_len),
        "falling": 20 - key * (20 / kv_len),
        "sawtooth": (tile % 3) * 3.0,
        "one loud tile": (tile == 5) * 9.0,
        "heavy tails": (normal(kv_len) ** 3)[tile],
    }[pattern]
    direction = torch.nn.functional.normalize(normal(head_dim), dim=0)
    q = 0.3 * normal(qo_len, heads[0], head_dim) + direction * head_dim**0.5
    k, v = normal(2, kv_len, heads[1], head_dim).unbind()
    k = 0.3 * k + level[:, None, None] * direction
    starts = [indptr([n], device) for n in lengths]
    return Ragged(q.to(dtype), k.to(dtype), v.to(dtype), *starts)


def omitted_share(
    batch: Ragged, dense: SkipMap, kept: Tensor, soft_cap: float | None = None
) -> Tensor:
    """Softmax mass of the keys in tiles that are not `kept`, in float64: ``[heads, rows]``.

    `batch` is one request, `dense` a map of it with all kept, `kept` bool ``[sequences, units,
    tiles]``. Without sinks, which only make a share smaller.
    """
    group = batch.q.shape[1] // batch.k.shape[1]
    keys = batch.k.double().repeat_interleave(group, 1).permute(1, 2, 0)
    s = batch.q.double().transpose(0, 1) @ keys * batch.q.shape[2] ** -0.5
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    p = s.masked_fill(~kept_keys(dense), -torch.inf).softmax(-1).nan_to_num(0)
    geometry = dense.geometry
    by_key = (~kept).repeat_interleave(geometry.keys_per_vote, 2)[..., : geometry.kv_len]
    return (p * by_row(by_key, geometry)).sum(-1)

"""A text whose tokens are given: a prompt in prefill, then decode steps, in one forward pass.

Because the tokens are known, every decode step of a layer can run at once: the row of position p is
a request of p + 1 keys, and all of them share the cache. What comes out is what one step after the
other would give, apart from rounding, at a small part of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashskip import BatchDecodeWrapper, BatchPrefillWrapper
from flashskip.calibration.measure import decode_table, exchanged_attention
from flashskip.integrations._phases import new_workspace

_ROWS = 1024  # of logits at a time
Options = Mapping[str, Any]


@dataclass
class Forced:
    """Attention of one text: the first `prompt_len` tokens as prefill, the others as decode steps.

    `prefill` and `decode` are options of `plan()`; where they skip, `achieved` counts.
    """

    prompt_len: int
    prefill: Options = field(default_factory=dict)
    decode: Options = field(default_factory=dict)
    _prefill: BatchPrefillWrapper | None = None
    _decode: BatchDecodeWrapper | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if self._prefill is None:
            self._plan(query, key)
        assert self._prefill is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = q.new_empty(q.shape)
        p = self.prompt_len
        self._prefill.run(q[:p], k[:p], v[:p], out=out[:p])
        if self._decode is not None:
            self._decode.run(q[p:], (key, value), out=out[p:])
        return out[None], None

    def achieved(self) -> dict[str, float]:
        """Return the share of skipped decisions of each phase that skips."""
        wrappers = {"prefill": (self._prefill, self.prefill), "decode": (self._decode, self.decode)}
        found = {}
        for phase, (wrapper, options) in wrappers.items():
            if wrapper is not None and options:
                skipped, visited = wrapper.stats.sum(dim=(0, 1)).tolist()
                found[phase] = skipped / visited
        return found

    def _plan(self, query: Tensor, key: Tensor) -> None:
        heads, kv_heads, length, dim = query.shape[1], key.shape[1], query.shape[2], query.shape[3]
        self._prefill = BatchPrefillWrapper(new_workspace(query.device))
        starts = torch.tensor([0, self.prompt_len], dtype=torch.int32, device=query.device)
        options = _counting(self.prefill, query)
        self._prefill.plan(starts, starts, heads, kv_heads, dim, causal=True, **options)
        if length > self.prompt_len:
            self._decode = BatchDecodeWrapper(new_workspace(query.device), kv_layout="HND")
            table = decode_table(torch.arange(self.prompt_len, length, device=query.device))
            options = _counting(self.decode, query)
            self._decode.plan(*table, heads, kv_heads, dim, length, **options)


def _counting(options: Options, query: Tensor) -> dict[str, Any]:
    return {"q_data_type": query.dtype, **options, "collect_stats": bool(options)}


@torch.no_grad()
def logits(model: Any, tokens: Tensor, first: int, function: Any) -> Iterator[Tensor]:
    """Yield the logits of the tokens from position `first` on, some rows at a time, in fp32.

    `tokens` is int64 ``[length]``. In 16 bits, logits would be coarser than what is compared here.
    """
    with exchanged_attention(model, function):
        inputs = tokens[None].to(model.device)
        hidden = model.base_model(inputs, use_cache=False).last_hidden_state[0, first:]
    head = model.get_output_embeddings().weight.detach().float()
    return (rows.float() @ head.T for rows in hidden.split(_ROWS))


@torch.no_grad()
def losses(model: Any, tokens: Tensor, first: int, function: Any) -> Tensor:
    """Return the loss, in nats, of each token after position `first`: fp32 ``[tokens]``."""
    targets = tokens[first + 1 :].to(model.device).split(_ROWS)
    found = [
        torch.nn.functional.cross_entropy(rows[: len(wanted)], wanted, reduction="none")
        for rows, wanted in zip(logits(model, tokens, first, function), targets, strict=False)
    ]
    return torch.cat(found)


class LocalErrors:
    """Dense attention that also skips, on the same inputs, and compares, in prefill.

    The omitted mass follows from the LSEs: a row keeps ``2 ** (skipped - dense)`` of its softmax.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._wrappers: list[BatchPrefillWrapper] = []
        self._sums: dict[str, Tensor] = {}
        self._layers = 0

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if not self._wrappers:
            self._plan(query, key)
        dense, skipping = self._wrappers
        inputs = [x[0].transpose(0, 1) for x in (query, key, value)]
        out, lse = dense.run(*inputs, return_lse=True)
        skipped_out, skipped_lse, bound = skipping.run(*inputs, return_lse=True)
        error = (skipped_out.float() - out.float()).norm(dim=-1) / out.float().norm(dim=-1)
        omitted = 1 - torch.exp2(skipped_lse - lse)
        found = {"bound": bound, "omitted": omitted, "output_error": error}
        for name, rows in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + rows.double().mean()
        self._layers += 1
        return out[None], None

    def means(self) -> dict[str, float]:
        """Return means over rows, heads and layers, and the share of skipped decisions."""
        skipped, visited = self._wrappers[1].stats.sum(dim=(0, 1)).tolist()
        means = {name: float(total) / self._layers for name, total in self._sums.items()}
        return {"achieved": skipped / visited, **means}

    def _plan(self, query: Tensor, key: Tensor) -> None:
        starts = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
        sizes = (starts, starts, query.shape[1], key.shape[1], query.shape[3])
        skipping = {**self._options, "collect_stats": True, "collect_bound": True}
        for options in ({}, skipping):
            wrapper = BatchPrefillWrapper(new_workspace(query.device))
            wrapper.plan(*sizes, q_data_type=query.dtype, causal=True, **options)
            self._wrappers.append(wrapper)

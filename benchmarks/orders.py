"""Skip rates at equal λ and at equal omitted mass, of the kernels: visiting orders, and seeds.

``python -m benchmarks.orders run`` takes the attention of SmolLM2-135M-Instruct at 8k tokens, and
the heads of `benchmarks.seeds`. Prefill runs in each order; decode runs seeded, and as splits that
restart from nothing would decide. The omitted mass is exact, from the LSEs. ``table`` and ``plot``
make tables and figures from the committed results.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import machine, seeds, texts
from benchmarks.curves import LOG2, OMITTED, Curves, sweep
from benchmarks.result_file import save
from flashskip import BatchDecodeWrapper, BatchPrefillWrapper, merge_states
from flashskip.geometry import ORDERS
from flashskip.integrations._phases import new_workspace

RESULTS = Path(__file__).parent / "results" / "orders.json"
TEXTS = ("reference 1", "_pyio")  # prose and code, nothing was fitted on them
TOKENS = 8192
LAYERS = 3  # every third one is studied
PAGE = seeds.TILE
ALONE_AT = 2.0**-6  # threshold at which requests run alone as well
LOOKED_AT = {name: ends for name, ends in seeds.SEEDS.items() if ends[0]}


class Prefill:
    """Every order and granularity, on the same q, k, v."""

    def __init__(self, curves: Curves, query: Tensor, key: Tensor) -> None:
        starts = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
        sizes = (starts, starts, query.shape[1], key.shape[1], query.shape[3])
        self.curves = curves
        self.threshold = torch.zeros(1, device=query.device)
        self.dense = BatchPrefillWrapper(new_workspace(query.device))
        self.dense.plan(*sizes, q_data_type=query.dtype, causal=True)
        self.skipping = {}
        for order, vote_kv in itertools.product(ORDERS, (64, 128)):
            wrapper = BatchPrefillWrapper(new_workspace(query.device))
            wrapper.plan(
                *sizes, q_data_type=query.dtype, causal=True, order=order, vote_kv=vote_kv,
                skip_softmax_threshold=self.threshold, collect_stats=True,
            )  # fmt: skip
            self.skipping[order, vote_kv] = wrapper

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add to the curves; return the dense output. All ``[tokens, heads, dim]``."""
        out, dense = self.dense.run(q, k, v, return_lse=True)
        for name, wrapper in self.skipping.items():
            found = sweep(
                wrapper, self.threshold, lambda w=wrapper: w.run(q, k, v, return_lse=True)[1]
            )
            self.curves.add(("order", *name), *found, dense)
        return out


class Decode:
    """Decode steps, seeded and restarting, that share a cache of pages as long as a tile.

    Request r has `lengths[r]` keys, in pages from `first_pages[r]` on. Its splits are compared
    where its last tile is full.
    """

    def __init__(
        self, curves: Curves, kind: str, lengths: Sequence[int], first_pages: Sequence[int],
        shape: tuple[int, int, int], like: Tensor,
    ) -> None:  # fmt: skip
        self.curves, self.kind, self.shape, self.device = curves, kind, shape, like.device
        self.options = {"q_data_type": like.dtype}
        self.lengths = torch.tensor(lengths)
        self.pages = [
            first + np.arange(-(-length // PAGE))
            for length, first in zip(lengths, first_pages, strict=True)
        ]
        self.tails = (self.lengths - 1) % PAGE + 1
        self.by_tail = {
            int(t): torch.nonzero(self.tails == t)[:, 0].to(self.device)
            for t in self.tails.unique()
        }
        self.full = self.by_tail[PAGE]
        self.tables = {r: self._table([self.pages[r]], [PAGE]) for r in self.full.tolist()}
        self.threshold = torch.zeros(len(lengths), device=like.device)
        table = self._table(self.pages, self.tails.tolist())
        self.dense, self.seeded, self.alone = (
            BatchDecodeWrapper(new_workspace(like.device), kv_layout="HND") for _ in range(3)
        )
        self.dense.plan(*table, *shape, PAGE, **self.options)
        self.options |= {"collect_stats": True}
        self.seeded.plan(
            *table, *shape, PAGE, skip_softmax_threshold=self.threshold, **self.options
        )
        self.restarting = {splits: self._restarting(splits) for splits in seeds.SPLITS}
        self.differing = torch.zeros((), dtype=torch.int64, device=like.device)
        self.ran_alone = 0

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add to the curves; q ``[requests, heads, dim]``, pages ``[pages, kv heads, 64, dim]``."""
        dense = self.dense.run(q, (k, v), return_lse=True)[1]
        self._run_seeded(q, (k, v), dense)
        self._run_alone(q, (k, v))
        for splits in self.restarting:
            self._run_restarting(splits, q, (k, v), dense[self.full])

    def _run_seeded(self, q: Tensor, cache: tuple[Tensor, Tensor], dense: Tensor) -> None:
        counts, lse = sweep(
            self.seeded, self.threshold, lambda: self.seeded.run(q, cache, return_lse=True)[1]
        )
        for tail, own in self.by_tail.items():
            self.curves.add(("tail", self.kind, tail), counts[:, own], lse[:, own], dense[own])

    def _run_alone(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> None:
        """Count the requests that decide otherwise alone, cut over the whole GPU, than in here."""
        self.threshold.fill_(ALONE_AT)
        self.seeded.reset_stats()
        self.seeded.run(q, cache)
        for r, table in self.tables.items():
            self.alone.plan(
                *table, *self.shape, PAGE, skip_softmax_threshold=ALONE_AT, **self.options
            )
            self.alone.run(q[r : r + 1], cache)
            self.differing += (self.alone.stats[0] != self.seeded.stats[r]).any()
        self.ran_alone += len(self.tables)

    def _restarting(self, splits: int) -> tuple[BatchPrefillWrapper, Tensor]:
        """Plan each split as a request of its own, ascending: the group's heads are its rows.

        Prefill judges load tiles of 128 keys as one, decode judges 64. So each tile stands twice in
        the page table: it makes a load tile alone, and shares of the softmax are what they were.
        Prefill would judge so few rows by the seed, which is what the splits are compared with.
        """
        heads, kv_heads, dim = self.shape
        parts = [p for r in self.tables for p in np.array_split(self.pages[r], splits)]
        table = self._table([p.repeat(2) for p in parts], [PAGE] * len(parts))
        rows = torch.arange(len(parts) + 1, dtype=torch.int32, device=self.device)
        threshold = torch.zeros(len(parts), device=self.device)
        wrapper = BatchPrefillWrapper(new_workspace(self.device), kv_layout="HND")
        wrapper._seeded = False
        wrapper.plan_paged(
            rows * (heads // kv_heads), *table, kv_heads, kv_heads, dim, PAGE, order="ascending",
            vote_kv=64, skip_softmax_threshold=threshold, **self.options,
        )  # fmt: skip
        return wrapper, threshold

    def _run_restarting(
        self, splits: int, q: Tensor, cache: tuple[Tensor, Tensor], dense: Tensor
    ) -> None:
        """Run and merge the splits; their rows are ``[requests, splits, group, kv heads]``."""
        heads, kv_heads, dim = self.shape
        requests, group = len(self.full), heads // kv_heads
        rows = q[self.full].view(requests, 1, kv_heads, group, dim).transpose(2, 3)
        rows = rows.expand(-1, splits, -1, -1, -1).reshape(-1, kv_heads, dim)
        dense = dense.view(requests, kv_heads, group).transpose(1, 2).reshape(requests, heads)
        wrapper, threshold = self.restarting[splits]

        def run() -> Tensor:
            out, lse = wrapper.run(rows, cache, return_lse=True)
            states = out.view(requests, splits, heads, dim), lse.view(requests, splits, heads)
            return merge_states(*states)[1] - 1  # each key was there twice

        self.curves.add(("split", self.kind, splits), *sweep(wrapper, threshold, run), dense)

    def _table(self, pages: list[Any], tails: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        indptr = np.cumsum([0, *map(len, pages)])
        found = (indptr, np.concatenate(pages), tails)
        return tuple(torch.tensor(x, dtype=torch.int32, device=self.device) for x in found)  # type: ignore[return-value]


def add_reference(curves: Curves, kind: str, lengths: Tensor, q: Tensor, k: Tensor) -> None:
    """Add curves of seeds that the kernel does not have, in plain torch.

    q is ``[requests, heads, dim]``; k, ``[kv heads, keys, dim]``, serves all requests.
    """
    requests, dim = q.shape[0], q.shape[-1]
    rows = q.float().view(requests, k.shape[0], -1, dim)
    s = torch.einsum("rghd,gkd->rghk", rows, k.float()) * (math.log2(math.e) / math.sqrt(dim))
    ends = lengths.to(q.device)[:, None, None, None]
    s = s.masked_fill(torch.arange(k.shape[1], device=q.device) >= ends, -math.inf)
    tiles = s.unflatten(-1, (-1, PAGE))
    t = tiles.amax(-1)
    mass = (s * math.log(2)).softmax(-1).unflatten(-1, (-1, PAGE)).sum(-1)
    number, last = torch.arange(t.shape[-1], device=q.device), (ends - 1) // PAGE
    visited = (number <= last)[:, :, 0].expand(-1, k.shape[0], -1)
    tails = (lengths - 1) % PAGE + 1
    for name, (_, count) in LOOKED_AT.items():
        in_seed = (number == 0) | ((number > last - count) & (number <= last))
        gaps = (t - t.masked_fill(~in_seed, -math.inf).amax(-1, keepdim=True)).amax(2)
        skips = [visited & (gaps < log2) for log2 in LOG2]
        omitted = torch.stack([(mass * skip[:, :, None]).sum(-1) for skip in skips]).double()
        skipped = torch.stack([skip.sum(-1) for skip in skips])
        counts = torch.stack([skipped, visited.sum(-1).expand_as(skipped)], -1)
        shift = -torch.log2(1 - omitted)
        for tail in tails.unique().tolist():
            own = torch.nonzero(tails == tail)[:, 0].to(q.device)
            parts = (x[:, own] for x in (counts, omitted, shift))
            curves.add_omitted(("reference", kind, name, tail), *parts)


class Model:
    """In the place of a model's attention: dense, and the study of every so many-th layer."""

    def __init__(self, curves: Curves, decoded: int, every: int, name: str = "SmolLM2") -> None:
        self.curves, self.decoded, self.every, self.name = curves, decoded, every, name
        self.prefill: Prefill | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if self.prefill is None:
            self._plan(query, key)
        assert self.prefill is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if module.layer_idx % self.every:
            return self.prefill.dense.run(q, k, v)[None], None
        out = self.prefill.run(q, k, v)
        steps = q[self.lengths.to(q.device) - 1].contiguous()
        pages = (x[0].unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous() for x in (key, value))
        self.decode.run(steps, *pages)
        add_reference(self.curves, self.name, self.lengths, steps, key[0])
        return out[None], None

    def _plan(self, query: Tensor, key: Tensor) -> None:
        self.prefill = Prefill(self.curves, query, key)
        tiles = query.shape[2] // PAGE
        last = range(tiles - self.decoded, tiles)
        lengths = [PAGE * tile + tail for tile, tail in itertools.product(last, seeds.TAILS)]
        shape = (query.shape[1], key.shape[1], query.shape[3])
        self.lengths = torch.tensor(lengths)
        self.decode = Decode(self.curves, self.name, lengths, [0] * len(lengths), shape, query)


def run_synthetic(curves: Curves, kind: str, keys: int, like: Tensor, dim: int = 64) -> Decode:
    """Decode on heads whose scores are drawn: the row of a group's head r reads them in channel r.

    A score is the sum of two channels, as one of 16 bits would be too coarse.
    """
    drawn = seeds.draw_scores(kind, keys, np.random.default_rng(0))
    scores = torch.tensor(drawn, device=like.device, dtype=torch.float32)
    high = scores.to(like.dtype)
    k = torch.zeros(seeds.HEADS, keys, dim, dtype=like.dtype, device=like.device)
    k[..., : seeds.ROWS] = high.transpose(1, 2)
    k[..., seeds.ROWS : 2 * seeds.ROWS] = (scores - high.float()).to(like.dtype).transpose(1, 2)
    q = torch.zeros(seeds.HEADS, seeds.ROWS, dim, dtype=like.dtype, device=like.device)
    for row in range(seeds.ROWS):
        q[:, row, [row, row + seeds.ROWS]] = math.sqrt(dim)
    pages = k.view(-1, 1, PAGE, dim)
    first = [r * (keys // PAGE) for r in range(seeds.HEADS)]
    decode = Decode(curves, kind, [keys] * seeds.HEADS, first, (seeds.ROWS, 1, dim), k)
    decode.run(q, pages, pages)
    return decode


def pieces(tokenizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the beginning of each text: int64 ``[1, TOKENS]``."""
    for text in texts.held_out():
        if text.name in TEXTS:
            ids = tokenizer(text.content[: 16 * TOKENS], add_special_tokens=False)["input_ids"]
            if len(ids) < TOKENS:
                raise ValueError(f"{text.name} has {len(ids)} tokens; expected at least {TOKENS}")
            yield text.name, torch.tensor(ids[:TOKENS])[None]


@torch.no_grad()
def study(device: str, commit: str) -> dict[str, Any]:
    """Measure everything."""
    from flashskip.calibration.measure import exchanged_attention
    from flashskip.integrations import demo

    start = time.perf_counter()
    curves = Curves()
    model, tokenizer = demo.load(None, device)
    print(f"loaded after {time.perf_counter() - start:.1f} s", flush=True)
    attend = Model(curves, decoded=32, every=LAYERS)
    with exchanged_attention(model, attend):
        for name, tokens in pieces(tokenizer):
            model(tokens.to(device), use_cache=False, logits_to_keep=1)
            print(f"{name} after {time.perf_counter() - start:.1f} s", flush=True)
    decodes = {attend.name: attend.decode}
    like = next(model.parameters())
    for kind in seeds.KINDS:
        decodes[kind] = run_synthetic(curves, kind, seeds.KEYS, like)
    alone = {
        name: {"requests": d.ran_alone, "differing": int(d.differing)}
        for name, d in decodes.items()
    }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(torch.device(device), commit),
        "model": "SmolLM2-135M-Instruct", "texts": TEXTS, "tokens": TOKENS, "every_layer": LAYERS,
        "synthetic_keys": seeds.KEYS, "omitted": OMITTED, "log2_thresholds": LOG2,
        "seconds": round(time.perf_counter() - start, 1), "alone": alone,
        "curves": [{"name": name, **curve} for name, curve in curves.points().items()],
    }  # fmt: skip


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orders", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure on a GPU and write a result file")
    run.add_argument("--out", type=Path, default=RESULTS)
    run.add_argument("--commit", default="", help="of the sources, where this copy has no git")
    commands.add_parser("table", help="write the tables of docs/kernels/")
    commands.add_parser("plot", help="write its figures")
    arguments = parser.parse_args()
    if arguments.command == "run":
        save(arguments.out, study("cuda", arguments.commit))
        return
    from benchmarks import orders_report

    results = json.loads(RESULTS.read_text())
    write = {"table": orders_report.write_pages, "plot": orders_report.write_figures}
    write[arguments.command](results)


if __name__ == "__main__":
    main()

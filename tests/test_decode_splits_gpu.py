"""Decode decides alike however the keys are divided: over 1, 4, 16 or 64 CTAs, alone or in a batch.

V shows the decisions themselves: each tile has a channel of its own, which stays 0 in all rows of a
unit that skipped it. Every tile is looked at, as many in a run as V has channels.
"""

from __future__ import annotations

import pytest
import torch
from paged import (
    LAMBDA,
    ROUNDING_BAND,
    Paged,
    assert_counts,
    assert_matches,
    make_paged,
    oracle,
    plan,
    run,
    skipping,
)
from torch import Tensor

from flashskip import _wrapper, reference

pytestmark = pytest.mark.gpu

CTAS = (1, 4, 16, 64)
KV_HEADS, GROUP, TILE = 2, 4, 64
BATCHES = {"one": (8192,), "ragged": (8192, 5000, 64, 0, 65, 1, 7777, 700)}
# How loud hot tiles are, the share of tiles besides tile 0 that are, and lambda by head dim: far
# from all decisions, and in the middle of those over cold tiles.
SINK = (9.0, 0.02, {128: 1e-2, 64: 1e-2})
SPREAD = (6.5, 0.3, {128: 0.03, 64: 0.01})
Content = tuple[float, float, dict[int, float]]


@pytest.fixture
def ctas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of CTAs that the next plan is launched with, in place of the GPU's own."""
    number = [1]
    monkeypatch.setattr(_wrapper, "multiprocessors", lambda device: number[0])
    return number


def alone(batch: Paged, i: int) -> Paged:
    """Request `i` as a batch of its own, on the same cache."""
    start, end = batch.indptr[i : i + 2].tolist()
    table = (batch.indptr[i : i + 2] - start, batch.indices[start:end].clone())
    own = (*table, batch.last_page_len[i : i + 1].clone())
    return Paged(batch.q[i : i + 1], batch.cache, batch.k, batch.v, batch.layout, *own)


def lengths(batch: Paged) -> list[int]:
    """Keys of each request."""
    full = (batch.indptr.diff() - 1).clamp(min=0) * batch.k.shape[1]
    return torch.where(batch.indptr.diff() > 0, full + batch.last_page_len, 0).tolist()


def show_tiles(batch: Paged, first: int) -> None:
    """Make V one-hot: a key of tile `first + c` is 1 in channel c, and 0 elsewhere."""
    channels = batch.v.shape[3]
    for request, n in enumerate(lengths(batch)):
        key = torch.arange(n, device=batch.q.device)
        hot = key[:, None] // TILE == first + torch.arange(channels, device=batch.q.device)
        batch.v[batch.place(request, key)] = hot.to(batch.v.dtype)[:, None].expand(-1, KV_HEADS, -1)


def decide(batch: Paged, threshold: float) -> tuple[list[Tensor], Tensor]:
    """Skip maps as V shows them, bool ``[KV heads, tiles]`` of each request, and the counters."""
    tiles = [-(-n // TILE) for n in lengths(batch)]
    wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True)
    found, counted = [], []
    for first in range(0, max(*tiles, 1), batch.v.shape[3]):
        show_tiles(batch, first)
        wrapper.reset_stats()
        out, _ = run(wrapper, batch)
        again, _ = run(wrapper, batch)
        assert torch.equal(out, again)
        found.append((out.unflatten(1, (KV_HEADS, GROUP)) > 0).any(2))
        counted.append(wrapper.stats // 2)
    assert all(torch.equal(stats, counted[0]) for stats in counted)
    kept = torch.cat(found, 2)
    assert not any(kept[i, :, n:].any() for i, n in enumerate(tiles))
    return [kept[i, :, :n] for i, n in enumerate(tiles)], counted[0]


def assert_same_maps(found: list[Tensor], expected: list[Tensor]) -> None:
    """The very same decisions, one by one."""
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_the_oracles(kept: list[Tensor], stats: Tensor, exact: reference.Result) -> None:
    """The oracle's maps but for decisions within rounding, and the counters of these very maps."""
    assert exact.skip_map is not None
    for i, skip_map in enumerate(exact.skip_map):
        assert skip_map.state.shape[1] == 1  # a group of 4 is one unit
        sure = skip_map.margin[:, 0].abs() >= ROUNDING_BAND
        assert torch.equal(kept[i] & sure, skip_map.kept[:, 0] & sure)
        assert sure.double().mean() > 0.99 or kept[i].shape[1] == 0
        assert stats[i, :, 1].tolist() == KV_HEADS * [kept[i].shape[1]]
        assert torch.equal(stats[i, :, 0], (~kept[i]).sum(1))


@pytest.mark.variants(lambda head_dim: [skipping(GROUP, head_dim)])
@pytest.mark.parametrize("content", [SINK, SPREAD], ids=["sink", "spread"])
@pytest.mark.parametrize("kv_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_maps_do_not_depend_on_the_number_of_splits(
    head_dim: int, kv_lens: tuple[int, ...], content: Content, ctas: list[int]
) -> None:
    gain, hot, thresholds = content
    threshold, shape = thresholds[head_dim], (KV_HEADS * GROUP, KV_HEADS, head_dim)
    batch = make_paged(kv_lens, *shape, gain=gain, hot=hot)
    exact = oracle(plan(batch, skip_softmax_threshold=threshold), batch, threshold)
    assert 0.02 < exact.counts[0, :, 0].sum() / exact.counts[0, :, 1].sum() < 0.999
    first = None
    for ctas[0] in CTAS:
        kept, stats = decide(batch, threshold)
        assert_the_oracles(kept, stats, exact)
        first = first or (kept, stats)
        assert_same_maps(kept, first[0])
        assert torch.equal(stats, first[1])
        for i in range(len(kv_lens)) if len(kv_lens) > 1 else ():
            own, counted = decide(alone(batch, i), threshold)
            assert_same_maps(own, [kept[i]])
            assert torch.equal(counted[0], stats[i])


@pytest.mark.variants(lambda head_dim: [skipping(GROUP, head_dim)])
@pytest.mark.parametrize("kv_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_outputs_of_any_number_of_splits_are_within_the_budget(
    head_dim: int, kv_lens: tuple[int, ...], ctas: list[int]
) -> None:
    gain, hot, thresholds = SPREAD
    threshold = thresholds[head_dim]
    batch = make_paged(kv_lens, KV_HEADS * GROUP, KV_HEADS, head_dim, gain=gain, hot=hot)
    states = []
    for ctas[0] in CTAS:
        wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True)
        partial = wrapper._planned().buffers["partial"][: wrapper.workspace_bytes].fill_(255)
        out, lse = run(wrapper, batch)
        states.append((partial.view(2 * ctas[0], -1) != 255).any(1).sum().item())
        exact = oracle(wrapper, batch, threshold)
        assert_matches(batch, out, lse, exact)
        assert_counts(wrapper.stats, exact)
        for _ in range(5):
            again = run(wrapper, batch)
            assert torch.equal(out, again[0])
            assert torch.equal(lse, again[1])
    # The states of segments that are merged: there were splits, and ever more of them.
    assert states[0] == 0 < states[1] < states[2] < states[3]


def make_uneven(kv_lens: tuple[int, ...], quiet: int) -> Paged:
    """The queries of one KV head do not look where hot tiles draw those of the other."""
    heads = (KV_HEADS * GROUP, KV_HEADS)
    batch = make_paged(kv_lens, *heads, hot=0.05)
    of_quiet = slice(quiet * GROUP, (quiet + 1) * GROUP)
    batch.q[:, of_quiet] = 0.5 * make_paged(kv_lens, *heads, seed=1, hot=None).q[:, of_quiet]
    return batch


def assert_uneven(stats: Tensor, kv_lens: tuple[int, ...], quiet: int) -> None:
    """KV head `quiet` skips nothing, the other more than half of each long request."""
    skipped, visited = stats.unbind(2)
    assert not skipped[:, quiet].any()
    is_long = torch.tensor(kv_lens) > 1000
    assert (skipped[is_long, 1 - quiet] > 0.5 * visited[is_long, 1 - quiet]).all()


def attend_alike(batch: Paged, ctas: list[int]) -> Tensor:
    """Hold outputs and counters on any number of CTAs to the oracle's; returns the counters."""
    exact = oracle(plan(batch, skip_softmax_threshold=LAMBDA), batch, LAMBDA)
    counted = []
    for ctas[0] in CTAS:
        wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
        out, lse = run(wrapper, batch)
        assert_matches(batch, out, lse, exact)
        assert_counts(wrapper.stats, exact)
        assert all(map(torch.equal, run(wrapper, batch), (out, lse)))
        counted.append(wrapper.stats // 2)
    assert all(torch.equal(stats, counted[0]) for stats in counted)
    return counted[0]


@pytest.mark.variants([skipping(GROUP)])
@pytest.mark.parametrize("quiet", range(KV_HEADS))
def test_heads_that_skip_unevenly(quiet: int, ctas: list[int]) -> None:
    kv_lens = BATCHES["ragged"]
    assert_uneven(attend_alike(make_uneven(kv_lens, quiet), ctas), kv_lens, quiet)


def decide_alike(batch: Paged, ctas: list[int]) -> tuple[list[Tensor], Tensor]:
    """The decisions and counters, which are the oracle's on any number of CTAs."""
    exact = oracle(plan(batch, skip_softmax_threshold=LAMBDA), batch, LAMBDA)
    decided = []
    for ctas[0] in CTAS:
        kept, stats = decide(batch, LAMBDA)
        assert_the_oracles(kept, stats, exact)
        decided.append((kept, stats))
        assert_same_maps(kept, decided[0][0])
        assert torch.equal(stats, decided[0][1])
    return decided[0]


@pytest.mark.variants([skipping(GROUP)])
@pytest.mark.parametrize("quiet", range(KV_HEADS))
def test_decisions_of_heads_that_skip_unevenly(quiet: int, ctas: list[int]) -> None:
    kv_lens = BATCHES["ragged"]
    _, stats = decide_alike(make_uneven(kv_lens, quiet), ctas)
    assert_uneven(stats, kv_lens, quiet)


def tiles_of_heads(num_tiles: int, device: torch.device) -> Tensor:
    """Bool ``[KV heads, tiles, GROUP]``: the query heads that a tile draws; tile 0 draws all."""
    tile = torch.arange(num_tiles, device=device)[:, None]
    shift = 5 * torch.arange(KV_HEADS, device=device)[:, None, None]
    return ((tile + shift) % 37 == torch.arange(GROUP, device=device)) | (tile == 0)


def make_own_tiles(kv_lens: tuple[int, ...], quiet: int) -> Paged:
    """Each query head of a group is drawn by tiles of its own, and number `quiet` by none."""
    batch = make_paged(kv_lens, KV_HEADS * GROUP, KV_HEADS, hot=None)
    looks = 12 * torch.eye(batch.q.shape[2], device=batch.q.device)[:GROUP]
    towards = looks.repeat(KV_HEADS, 1)
    towards[quiet] = 0
    batch.q = (0.5 * batch.q + towards).to(batch.q.dtype)
    for request, n in enumerate(kv_lens):
        key = torch.arange(n, device=batch.q.device)
        drawn = tiles_of_heads(-(-n // TILE), key.device)[:, key // TILE].transpose(0, 1)
        place = batch.place(request, key)
        batch.k[place] = (0.5 * batch.k[place] + drawn.float() @ looks).to(batch.k.dtype)
    return batch


@pytest.mark.variants([skipping(GROUP)])
@pytest.mark.parametrize("quiet", range(KV_HEADS * GROUP))
def test_query_heads_of_a_group_vote_for_tiles_of_their_own(quiet: int, ctas: list[int]) -> None:
    """What one head of a group looks at is kept for all; one that looks at all keeps everything."""
    kv_lens, of_quiet = BATCHES["ragged"], quiet // GROUP
    kept, stats = decide_alike(make_own_tiles(kv_lens, quiet), ctas)
    for of_request in kept:
        drawn = tiles_of_heads(of_request.shape[1], of_request.device).any(2)
        drawn[of_quiet] = True
        assert torch.equal(of_request, drawn)
    assert_uneven(stats, kv_lens, of_quiet)


@pytest.mark.variants([skipping(GROUP)])
@pytest.mark.parametrize("quiet", [0, KV_HEADS * GROUP - 1])
def test_outputs_of_query_heads_with_tiles_of_their_own(quiet: int, ctas: list[int]) -> None:
    kv_lens = BATCHES["ragged"]
    assert_uneven(attend_alike(make_own_tiles(kv_lens, quiet), ctas), kv_lens, quiet // GROUP)

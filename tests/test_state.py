"""Merging attention states."""

import math

import pytest
import torch
from plain_attention import one_request, random_qkv
from torch import Tensor

from flashskip import merge_state, merge_states
from flashskip.geometry import Geometry
from flashskip.reference import attention

INF = math.inf


def random_states(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(5, count, 3, 8, generator=generator).to(dtype)
    return v, torch.randn(5, count, 3, generator=generator) * 10


def softmax_merge(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, through natural logarithms."""
    natural = s.double() * math.log(2)
    weights = torch.softmax(natural, 1)[..., None]
    return (weights * v.double()).sum(1), torch.logsumexp(natural, 1) / math.log(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_merge_weighs_by_mass(count: int, dtype: torch.dtype) -> None:
    v, s = random_states(count, dtype)
    merged, lse = merge_states(v, s)
    expected, expected_lse = softmax_merge(v, s)
    assert merged.dtype == dtype
    assert lse.dtype == torch.float32
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(merged.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_two_states_merge_as_a_stack_of_two() -> None:
    v, s = random_states(2)
    merged, lse = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    stacked, stacked_lse = merge_states(v, s)
    assert torch.equal(merged, stacked)
    assert torch.equal(lse, stacked_lse)


@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_empty_state_keeps_the_other_exactly(dtype: torch.dtype, garbage: float) -> None:
    v, s = random_states(1, dtype)
    v, s = v[:, 0], s[:, 0]
    nothing, empty = torch.full_like(v, garbage), torch.full_like(s, -INF)
    for merged, lse in (merge_state(v, s, nothing, empty), merge_state(nothing, empty, v, s)):
        assert torch.equal(merged, v)
        assert torch.equal(lse, s)


def test_all_empty_stays_empty() -> None:
    merged, lse = merge_states(torch.full((2, 3, 4, 8), math.nan), torch.full((2, 3, 4), -INF))
    assert torch.equal(merged, torch.zeros(2, 4, 8))
    assert torch.equal(lse, torch.full((2, 4), -INF))


def test_large_lse_does_not_overflow() -> None:
    v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    merged, lse = merge_states(v, torch.full((1, 2, 1), 3000.0))
    assert merged.item() == 2.0
    assert lse.item() == 3001.0


def test_no_queries() -> None:
    merged, lse = merge_states(torch.zeros(0, 2, 3, 8), torch.zeros(0, 2, 3))
    assert (merged.shape, lse.shape) == ((0, 3, 8), (0, 3))


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    q, k, v = random_qkv(0, 40, 300)
    geometry = Geometry.prefill()
    whole = one_request(q, k, v, geometry)
    parts = [one_request(q, k[part], v[part], geometry) for part in (slice(100), slice(100, None))]
    empty = attention(q, k[:0], v[:0], qo_indptr=[0, 40], kv_indptr=[0, 0], geometry=geometry)
    parts.append(empty)
    merged, lse = merge_states(
        torch.stack([part.out.float() for part in parts], 1),
        torch.stack([part.lse.float() for part in parts], 1),
    )
    torch.testing.assert_close(merged, whole.out.float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(lse, whole.lse.float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("v", "s", "message"),
    [
        (torch.zeros(2, 3, 8), torch.zeros(2, 3), "v is torch.float32 .*num_states"),
        (torch.zeros(2, 1, 3, 8), torch.zeros(2, 3), "s is .*it must be torch.float32"),
        (torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3).double(), "s is torch.float64"),
        (torch.zeros(2, 1, 3, 8).int(), torch.zeros(2, 1, 3), "it must be floating"),
        (torch.zeros(2, 0, 3, 8), torch.zeros(2, 0, 3), "at least one state"),
        (torch.zeros(2, 1, 3, 8, device="meta"), torch.zeros(2, 1, 3), "v is on meta"),
    ],
)
def test_misfits_are_refused(v: Tensor, s: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_states(v, s)


def test_unlike_pairs_are_refused() -> None:
    v, s = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="same shape and dtype"):
        merge_state(v, s, v.half(), s)
    with pytest.raises(ValueError, match="s_b is"):
        merge_state(v, s, v, s[:1])
    with pytest.raises(ValueError, match="move them together"):
        merge_state(v, s, v.to("meta"), s.to("meta"))


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"v_a is int; expected a torch\.Tensor"):
        merge_state(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"v is list; expected a torch\.Tensor"):
        merge_states([1], 2)

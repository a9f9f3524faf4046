"""FP8 (e4m3) caches on the CPU path: the numbers that they stand for, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paged import FP8, LAMBDA, Paged, check, make_paged, plan, run

import flashskip

BF16, FP16 = torch.bfloat16, torch.float16
LENS = (0, 1, 63, 64, 65, 300)


def fp8(**options: object) -> Paged:
    return make_paged(LENS, 8, 2, 64, kv_dtype=FP8, device="cpu", **options)


@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"k_scale": 0.5},
        {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([3.0])},
        {"k_scale": torch.tensor(0.5)},
    ],
)
def test_attention_is_that_of_the_scaled_cache(
    scales: dict, dtype: torch.dtype, threshold: float | None
) -> None:
    batch = fp8(dtype=dtype, page_size=5)
    batch.scales = scales
    check(batch, threshold)


def test_scales_are_read_by_each_run() -> None:
    batch = fp8()
    scale = torch.ones(1)
    batch.scales = {"v_scale": scale}
    wrapper = plan(batch)
    once = run(wrapper, batch)
    scale.fill_(2.0)
    twice = run(wrapper, batch)
    assert torch.equal(twice[0], once[0] * 2)
    assert torch.equal(twice[1], once[1])


BAD_SCALES = [
    ({"k_scale": 0.0}, ValueError, "k_scale is 0.0; expected a finite number above 0"),
    ({"v_scale": float("nan")}, ValueError, "v_scale is nan; expected a finite number above 0"),
    ({"v_scale": "1"}, TypeError, "v_scale is '1'; expected a number or a float32 tensor"),
    ({"k_scale": True}, TypeError, "k_scale is True"),
    ({"k_scale": torch.ones(3)}, ValueError, "k_scale has 3 entries; expected 1, or 2"),
    ({"k_scale": torch.ones(2, 1)}, ValueError, "k_scale has shape .2, 1.; expected one dimension"),
    ({"v_scale": torch.ones(2).double()}, ValueError, "v_scale has dtype torch.float64"),
    ({"k_scale": torch.ones(2).requires_grad_()}, ValueError, "k_scale requires a gradient"),
    ({"v_scale": torch.ones(1).requires_grad_()}, ValueError, "v_scale requires a gradient"),
]


@pytest.mark.parametrize(("scales", "error", "message"), BAD_SCALES)
def test_bad_scales_are_refused(scales: dict, error: type[Exception], message: str) -> None:
    batch = fp8()
    batch.scales = scales
    wrapper = plan(batch)
    with pytest.raises(error, match=message):
        run(wrapper, batch)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_a_16_bit_cache_are_refused(name: str) -> None:
    batch = make_paged(LENS, 8, 2, 64, device="cpu")
    batch.scales = {name: 1.0}
    with pytest.raises(ValueError, match=f"{name} is given with a torch.bfloat16 cache"):
        run(plan(batch), batch)


@pytest.mark.parametrize("scale", [2.0, torch.full((2,), 2.0)], ids=["number", "tensor"])
def test_scales_under_compile(scale: float | torch.Tensor) -> None:
    batch = fp8()
    wrapper = plan(batch)
    torch._dynamo.reset()
    compiled = torch.compile(wrapper.run, backend="eager", fullgraph=True)
    for k_scale in (scale, scale * 0.5):
        expected = wrapper.run(batch.q, batch.cache, k_scale=k_scale, v_scale=scale)
        found = compiled(batch.q, batch.cache, k_scale=k_scale, v_scale=scale)
        assert torch.equal(found, expected)


def test_appended_tokens_are_those_of_the_cache() -> None:
    batch = make_paged((5, 64, 130), 8, 2, 64, kv_dtype=FP8, device="cpu")
    k, v = (torch.randn(3, 2, 64).to(FP8) for _ in range(2))
    flashskip.append_paged_kv_cache(k, v, batch.cache, *batch.table)
    for request, n in enumerate((5, 64, 130)):
        page, slot = batch.place(request, torch.tensor([n - 1]))
        for cache, new in ((batch.k, k), (batch.v, v)):
            assert torch.equal(cache[page, slot][0].float(), new[request].float())


@pytest.mark.parametrize("paged", [False, True])
def test_prefill_refuses_an_fp8_cache(paged: bool) -> None:
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    indptr = torch.tensor([0, 4], dtype=torch.int32)
    page = (torch.tensor([0, 1], dtype=torch.int32), indptr[:1], torch.tensor([4]).int())
    options = {"q_data_type": FP16, "kv_data_type": FP8}
    plans = partial(wrapper.plan, indptr, indptr, 4, 2, 64)
    if paged:
        plans = partial(wrapper.plan_paged, indptr, *page, 4, 2, 64, page_size=4)
    with pytest.raises(flashskip.UnsupportedVariant, match="float8_e4m3fn in prefill; supported"):
        plans(**options)

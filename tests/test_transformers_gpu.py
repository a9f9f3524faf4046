"""flashskip inside transformers, through the kernels, on a small random model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import flashskip
from flashskip._options import PlanOptions
from flashskip.integrations.transformers import register
from flashskip.variant import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.llm]

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
DTYPE = torch.bfloat16


def prefill(**options) -> Variant:
    """The prefill kernel that the model reaches with these options."""
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    options = PlanOptions(q_data_type=DTYPE, causal=True, **options)
    return wrapper._variant(options, HEAD_DIM, HEAD_DIM)


def decode(page_size: int, **options) -> Variant:
    """The decode kernel that the model reaches with pages of this size."""
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    wrapper._page_size, wrapper._q_len_per_req = page_size, 1
    return wrapper._variant(PlanOptions(q_data_type=DTYPE, **options), HEAD_DIM, HEADS // KV_HEADS)


SKIPPING = {"skip_softmax_threshold": 0.1, "collect_stats": True}
DENSE = [prefill(), decode(1), decode(96), decode(97)]
VARIANTS = [*DENSE, prefill(**SKIPPING), *(decode(size, **SKIPPING) for size in (1, 512, 401))]


@pytest.fixture(scope="module")
def models():
    """The same weights in float32, to compare with, and in bfloat16."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.1,
    )
    exact = LlamaForCausalLM(config).eval().cuda().to(DTYPE)
    rounded = LlamaForCausalLM(config).eval().cuda().to(DTYPE)
    rounded.load_state_dict(exact.state_dict())
    return exact.float(), rounded


def tokens(*shape: int) -> torch.Tensor:
    ids = torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1))
    return ids.cuda()


@torch.no_grad()
def in_chunks(model, implementation: str, ids, sizes, cache=None, mask=None):
    """Logits of `ids`, fed in pieces through a cache."""
    model.set_attn_implementation(implementation)
    cache, outputs, start = cache or DynamicCache(), [], 0
    for size in sizes:
        end = start + size
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None:
            seen["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **seen)
        outputs.append(out.logits)
        start = end
    return torch.cat(outputs, dim=1)


def assert_as_good_as_eager(models, ids, sizes, real=None, **kwargs):
    """The error against float32 is of the size of eager bfloat16's own."""
    exact, rounded = models
    mask = kwargs.get("mask")
    truth = in_chunks(exact, "eager", ids, sizes, mask=mask)
    eager = in_chunks(rounded, "eager", ids, sizes, mask=mask).float()
    found = in_chunks(rounded, "flashskip", ids, sizes, **kwargs).float()
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    assert found.isfinite().all()
    error, budget = ((x - truth)[real].abs() for x in (found, eager))
    assert error.max() <= 3 * budget.max()
    assert error.mean() <= 1.5 * budget.mean()


@pytest.mark.variants(DENSE)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_prefill_and_decode(models, static):
    register()
    cache = StaticCache(models[1].config, max_cache_len=128) if static else None
    assert_as_good_as_eager(models, tokens(2, 96), [60, 30, 1, 1, 4], cache=cache)


@pytest.mark.variants(DENSE)
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_left_padding(models):
    register()
    mask = torch.ones(3, 80, dtype=torch.long, device="cuda")
    mask[1, :25], mask[2, :1] = 0, 0
    ids, real = tokens(3, 80), mask.bool()
    assert_as_good_as_eager(models, ids, [78, 1, 1], real=real, mask=mask)


@pytest.mark.variants(VARIANTS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_counts_equal_the_cpu_path(models, batch_size):
    """On tensors whose decisions leave no doubt: a few hot keys, everything else far below."""
    config = flashskip.SkipSoftmaxConfig(threshold=0.1)
    q = torch.ones(batch_size, HEADS, 400, HEAD_DIM)
    k = torch.zeros(batch_size, KV_HEADS, 400, HEAD_DIM)
    k[:, :, [0, 200]] = 1
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    seen = []
    for device in ("cpu", "cuda"):
        attention, layer = register(config, collect_stats=True), torch.nn.Module()
        x = [t.to(device, DTYPE) for t in (q, k, v)]
        with torch.no_grad():
            prefilled, _ = attention(layer, *x, None)
            decoded, _ = attention(layer, x[0][:, :, -1:], *x[1:], None)
        counts = attention.stats("prefill") + attention.stats("decode")
        seen.append((prefilled.cpu().float(), decoded.cpu().float(), counts))
    (prefill_cpu, decode_cpu, counts_cpu), (prefill_gpu, decode_gpu, counts_gpu) = seen
    assert counts_gpu == counts_cpu
    assert all(skipped > 0 for skipped, _ in counts_gpu)
    torch.testing.assert_close(prefill_gpu, prefill_cpu, atol=0.02, rtol=0.02)
    torch.testing.assert_close(decode_gpu, decode_cpu, atol=0.02, rtol=0.02)

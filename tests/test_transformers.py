"""flashskip inside transformers, against eager attention, on small random models."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from flashskip import (
    DenoiseProgress,
    SkipSoftmaxConfig,
    UnsupportedVariant,
    record_denoise_step,
    reference,
)
from flashskip.integrations import _masks
from flashskip.integrations.transformers import register

pytestmark = pytest.mark.llm

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 192,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,  # groups of three
    "head_dim": 64,
    "initializer_range": 0.3,  # so that attention decides the logits
}
TOLERANCE = 2e-3  # float32 against float32, over logits of about 20
WINDOW = 40


@pytest.fixture(autouse=True)
def dense_attention():
    return register()


@pytest.fixture(scope="module")
def llama():
    register()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture(scope="module")
def mistral():
    register()
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)).eval()


@pytest.fixture(scope="module")
def hot_llama():
    """A model whose queries all look for the tokens below 10: tiles without them can be skipped."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "initializer_range": 0.1}, attention_bias=True)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[:10, 0] = 20
        for layer in model.model.layers:
            # The pair of channels that the rotary embedding turns least.
            layer.self_attn.q_proj.bias.view(-1, 64)[:, 31] = 8
            layer.self_attn.k_proj.weight.view(-1, 64, 192)[:, 31, 0] = 1.5
    return model


def cold_text(length: int) -> torch.Tensor:
    """Tokens from 10 up, but for a few at the start and in one other place."""
    ids = tokens(1, length) % 80 + 10
    ids[0, [3, 200]] = 5
    return ids


@pytest.fixture(params=["llama", "mistral"])
def model(request):
    return request.getfixturevalue(request.param)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, implementation: str, *args, **kwargs) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(*args, **kwargs).logits


def padded(left: list[int], right: list[int], length: int):
    """A 2-D mask, and positions that count the tokens alone."""
    mask = torch.ones(len(left), length, dtype=torch.long)
    for row, (a, b) in enumerate(zip(left, right, strict=True)):
        mask[row, :a] = 0
        mask[row, length - b :] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_prefill_equals_eager(model, batch_size):
    ids = tokens(batch_size, 150)
    expected, found = (logits(model, name, ids) for name in ("eager", "flashskip"))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("left", "right"), [([0, 30, 7], [0, 0, 0]), ([0, 0, 0], [0, 50, 1]), ([5, 0, 9], [3, 60, 0])]
)
def test_padding_changes_nothing_for_real_tokens(model, left, right):
    ids = tokens(3, 120)
    mask, positions = padded(left, right, 120)
    kwargs = {"attention_mask": mask, "position_ids": positions}
    expected, found = (logits(model, name, ids, **kwargs) for name in ("eager", "flashskip"))
    assert found.isfinite().all()
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("left", [[0, 0], [0, 25]])
def test_generation_equals_eager(model, left):
    ids = tokens(2, 60)
    mask, _ = padded(left, [0, 0], 60)
    outputs = []
    for name in ("eager", "flashskip"):
        model.set_attn_implementation(name)
        outputs.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*outputs)


@torch.no_grad()
def in_chunks(model, implementation: str, cache, ids: torch.Tensor, sizes: list[int]):
    """Feed `ids` in pieces through a cache: several queries on a longer cache, then single ones."""
    model.set_attn_implementation(implementation)
    outputs, start = [], 0
    for size in sizes:
        piece = ids[:, start : start + size]
        outputs.append(model(piece, past_key_values=cache, use_cache=True).logits)
        start += size
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_chunks_through_a_cache_equal_one_pass(llama, static):
    ids = tokens(2, 90)
    cache = StaticCache(llama.config, max_cache_len=128) if static else DynamicCache()
    expected = logits(llama, "eager", ids)
    found = in_chunks(llama, "flashskip", cache, ids, [50, 30, 1, 1, 8])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_chunks_through_a_sliding_cache_equal_one_pass(mistral, static):
    ids = tokens(2, 90)
    expected = logits(mistral, "eager", ids)
    cache = (
        StaticCache(mistral.config, max_cache_len=128)
        if static
        else DynamicCache(config=mistral.config)
    )
    found = in_chunks(mistral, "flashskip", cache, ids, [50, 1, 1, 30, 1, 1])
    torch.testing.assert_close(found, expected[:, :84], atol=TOLERANCE, rtol=0)


def test_padding_between_tokens_in_decode(llama):
    ids = tokens(2, 40)
    mask, positions = padded([0, 0], [0, 12], 40)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    step_positions = mask.sum(1, keepdim=True) - 1
    found = []
    for name in ("eager", "flashskip"):
        llama.set_attn_implementation(name)
        with torch.no_grad():
            out = llama(ids, attention_mask=mask[:, :40], position_ids=positions, use_cache=True)
            cache = getattr(out, "cache", None) or out.past_key_values
            step = llama(
                tokens(2, 1),
                attention_mask=mask,
                position_ids=step_positions,
                past_key_values=cache,
            )
            found.append(step.logits)
    torch.testing.assert_close(found[1], found[0], atol=TOLERANCE, rtol=0)


def test_skipping_is_the_references_skipping(hot_llama):
    """The layer's output and counts are those of the reference on the layer's own tensors."""
    seen = {}
    attention = register(SkipSoftmaxConfig(threshold={"prefill": 0.05}), collect_stats=True)

    def spy(module, query, key, value, mask, **kwargs):
        out, weights = attention(module, query, key, value, mask, **kwargs)
        seen.setdefault(module.layer_idx, (query, key, value, out, kwargs["scaling"]))
        return out, weights

    from transformers import AttentionInterface

    AttentionInterface.register("flashskip", spy)
    logits(hot_llama, "flashskip", cold_text(400))
    total = 0
    for (query, key, value, out, scale), counts in zip(
        seen.values(), attention.stats("prefill"), strict=True
    ):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        phase = next(iter(attention._layers.values()))["prefill"]
        expected = reference.attention(
            q,
            k,
            v,
            qo_indptr=[0, 400],
            kv_indptr=[0, 400],
            geometry=phase.wrapper.geometry,
            sm_scale=scale,
            thresholds=[0.05],
        )
        torch.testing.assert_close(out[0], expected.out.float(), atol=1e-3, rtol=0)
        assert counts == tuple(expected.counts.sum(dim=(0, 1)).tolist())
        total += counts[0]
    assert total > 0


def test_stats_count_both_phases_until_reset(hot_llama):
    attention = register(SkipSoftmaxConfig(threshold=0.1), collect_stats=True)
    hot_llama.set_attn_implementation("flashskip")
    hot_llama.generate(cold_text(300), max_new_tokens=4, do_sample=False, pad_token_id=0)
    for phase in ("prefill", "decode"):
        counts = attention.stats(phase)
        assert len(counts) == 2
        assert all(0 < skipped < visited for skipped, visited in counts)
    attention.reset_stats()
    assert attention.stats("decode") == [(0, 0), (0, 0)]


def test_threshold_zero_skips_nothing(llama):
    ids = tokens(1, 200)
    dense = logits(llama, "flashskip", ids)
    attention = register(SkipSoftmaxConfig(threshold=0.0), collect_stats=True)
    assert torch.equal(logits(llama, "flashskip", ids), dense)
    assert all(skipped == 0 < visited for skipped, visited in attention.stats("prefill"))


def test_phase_without_threshold_is_dense(llama):
    attention = register(SkipSoftmaxConfig(threshold={"decode": 0.1}), collect_stats=True)
    logits(llama, "flashskip", tokens(1, 200))
    assert attention.stats("prefill") == [(0, 0), (0, 0)]


def test_compiled_model_equals_eager(llama):
    """The attention layers are graph breaks; everything around them is compiled."""
    ids = tokens(2, 60)
    mask, positions = padded([0, 20], [0, 0], 60)
    kwargs = {"attention_mask": mask, "position_ids": positions}
    expected = logits(llama, "eager", ids, **kwargs)
    llama.set_attn_implementation("flashskip")
    with torch.no_grad():
        found = torch.compile(llama, backend="eager")(ids, **kwargs).logits
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=TOLERANCE, rtol=0)


def test_custom_4d_mask_is_refused(llama):
    mask = torch.zeros(1, 1, 20, 20)
    with pytest.raises(UnsupportedVariant, match=r"a tensor \(1, 1, 20, 20\); .*'sdpa'"):
        logits(llama, "flashskip", tokens(1, 20), attention_mask=mask)


def test_output_attentions_is_refused(llama):
    with pytest.raises(UnsupportedVariant, match="passes output_attentions; "):
        logits(llama, "flashskip", tokens(1, 20), output_attentions=True)


def test_dropout_is_refused(dense_attention):
    x = torch.zeros(1, 2, 4, 64)
    with pytest.raises(UnsupportedVariant, match=r"passes dropout=0\.1; "):
        dense_attention(torch.nn.Module(), x, x, x, None, dropout=0.1)


def test_packed_sequences_are_refused(llama):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(UnsupportedVariant, match="neither causal nor a causal sliding window"):
        logits(llama, "flashskip", tokens(1, 8), position_ids=positions, use_cache=False)


def test_window_over_padding_between_tokens_is_refused(mistral):
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, 50:60] = 0
    with pytest.raises(UnsupportedVariant, match="padding between tokens"):
        logits(mistral, "flashskip", tokens(1, 100), attention_mask=mask)


def test_gradients_are_refused(llama):
    llama.set_attn_implementation("flashskip")
    with pytest.raises(ValueError, match="grad"):
        llama(tokens(1, 20))


def test_layers_share_scratch_memory(llama, monkeypatch):
    """A wrapper of its own for each layer and phase, and one workspace for all of them."""
    made = []
    monkeypatch.setattr(
        "flashskip.integrations.transformers.new_workspace",
        lambda device: made.append(device) or torch.empty(0),
    )
    attention = register()
    llama.set_attn_implementation("flashskip")
    with torch.inference_mode():
        llama.generate(torch.arange(1, 9)[None], max_new_tokens=2, do_sample=False)
    wrappers = [phase.wrapper for layer in attention._layers.values() for phase in layer.values()]
    assert len(wrappers) == 2 * llama.config.num_hidden_layers > 2
    assert len({id(w._workspace) for w in wrappers}) == len(made) == 1


def test_a_config_of_another_type_is_refused():
    with pytest.raises(TypeError, match="config is dict; expected a flashskip"):
        register({"threshold": 0.1})


def test_stats_without_skipping_are_refused():
    with pytest.raises(
        ValueError, match="collect_stats is set and config skips nothing; expected a thresh"
    ):
        register(collect_stats=True)


def test_unknown_phase_is_refused(dense_attention):
    with pytest.raises(
        ValueError, match="phase is 'training'; expected one of 'prefill', 'decode'"
    ):
        dense_attention.stats("training")


def test_ignored_layers_are_dense(hot_llama):
    config = SkipSoftmaxConfig(threshold=0.1, ignore=["model.layers.0"])
    with pytest.raises(ValueError, match="and model is None; expected the model"):
        register(config)
    attention = register(config, model=hot_llama, collect_stats=True)
    logits(hot_llama, "flashskip", cold_text(300))
    ignored, other = attention.stats("prefill")
    assert ignored == (0, 0)
    assert 0 < other[0] < other[1]


def test_a_gate_keeps_attention_dense_until_its_timestep(hot_llama):
    config = SkipSoftmaxConfig(threshold=0.1, disabled_until_timestep=0.5)
    attention = register(config, collect_stats=True)
    with DenoiseProgress():
        for timestep, skips in ((0.9, False), (0.4, True)):
            record_denoise_step(0, normalized_timestep=timestep)
            attention.reset_stats()
            logits(hot_llama, "flashskip", cold_text(300))
            assert all((skipped > 0) == skips for skipped, _ in attention.stats("prefill"))


def test_factor_divides_by_the_length_of_each_request(hot_llama):
    """A short prompt's threshold comes out above 1: it runs dense."""
    attention = register(SkipSoftmaxConfig(threshold_scale_factor=60.0), collect_stats=True)
    logits(hot_llama, "flashskip", cold_text(300)[:, :50])
    assert all(skipped == 0 for skipped, _ in attention.stats("prefill"))
    logits(hot_llama, "flashskip", cold_text(300))
    assert all(skipped > 0 for skipped, _ in attention.stats("prefill"))


@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_causal_windows_are_recognised(window):
    from transformers.masking_utils import (
        causal_mask_function,
        sliding_window_causal_mask_function,
    )

    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    mask = _masks.attention_mask(2, 30, 30, mask_function=function, local_size=window)
    assert (mask.causal, mask.window_left) == (True, window - 1 if window else -1)


@pytest.mark.parametrize("q_offset", [0, 10])
def test_chunked_masks_are_refused_where_they_differ_from_a_window(q_offset):
    from transformers.masking_utils import chunked_causal_mask_function

    function = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int))
    with pytest.raises(UnsupportedVariant, match="chunked"):
        _masks.attention_mask(1, 20, 20 + q_offset, q_offset, mask_function=function, local_size=8)


def test_padded_bidirectional_attention():
    """Every query sees all keys that are no padding, as in an encoder."""
    from transformers.masking_utils import bidirectional_mask_function

    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[1, 40:] = False
    mask = _masks.attention_mask(
        2, 70, 70, mask_function=bidirectional_mask_function, attention_mask=valid
    )
    q, k, v = torch.randn(3, 2, 4, 70, 64, generator=torch.Generator().manual_seed(0))
    out, _ = register()(torch.nn.Module(), q, k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, valid[:, None, None])
    torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-4, rtol=0)


def test_layers_are_forgotten_with_their_model():
    attention = register()
    small = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": 1})).eval()
    logits(small, "flashskip", tokens(1, 10))
    assert len(attention._layers) == 1
    del small
    gc.collect()
    assert len(attention._layers) == 0

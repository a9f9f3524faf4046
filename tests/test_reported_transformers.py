"""Case I01 from public bug reports: causality that gets lost between a framework and a kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from flashskip.integrations.transformers import register

pytestmark = pytest.mark.llm

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip
IDS = torch.randint(1, 97, (1, 33), generator=torch.Generator().manual_seed(25))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    register()
    torch.manual_seed(25)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, implementation: str, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits with an implementation that is switched to on the loaded model."""
    model.set_attn_implementation(implementation)
    return model(ids).logits[0].float()


def assert_agree(found: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """Close, and of the same choice wherever `expected` is decided."""
    assert ((found - expected).abs() <= atol).all()
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > 5e-2
    assert torch.equal(found.argmax(-1)[decided], expected.argmax(-1)[decided])


def test_reported_I01_logits_are_those_of_eager() -> None:
    """In float32, since bfloat16 layers around the attention round by more than 2e-2."""
    register()
    torch.manual_seed(25)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for _ in range(2):  # switched back and forth
        assert_agree(logits(model, "flashskip"), logits(model, "eager"), 2e-2)


def test_reported_I01_the_future_changes_no_bit(llama: LlamaForCausalLM) -> None:
    other = IDS.clone()
    other[0, -1] = (other[0, -1] + 7) % 97
    a, b = logits(llama, "flashskip"), logits(llama, "flashskip", other)
    assert torch.equal(a[:-1], b[:-1])
    assert not torch.equal(a[-1], b[-1])


@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding"])
def test_reported_I01_generation_is_that_of_sdpa(cache: str) -> None:
    """In float32 too: one rounding of these logits to bfloat16 is nearly the margin of the case."""
    register()
    torch.manual_seed(25)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    if cache == "sliding":
        model = (
            MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).to(torch.bfloat16).eval()
        )
    options = {"cache_implementation": "static"} if cache == "static" else {}
    outs = []
    for name in ("sdpa", "flashskip"):
        model.set_attn_implementation(name)
        outs.append(
            model.generate(
                IDS,
                attention_mask=torch.ones_like(IDS),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        )
    a, b = (out.sequences[0, 33:] for out in outs)
    if torch.equal(a, b):
        return
    first = int((a[: len(b)] != b[: len(a)]).nonzero()[0])
    top = outs[0].scores[first][0].float().topk(2).values
    assert top[0] - top[1] < 5e-2  # both were as good


def test_reported_I01_an_encoder_is_not_causal() -> None:
    register()
    torch.manual_seed(25)
    config = BertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.3,
    )  # fmt: skip
    model = BertModel(config).eval()
    outs = []
    with torch.no_grad():
        for name in ("eager", "flashskip"):
            model.set_attn_implementation(name)
            outs.append(model(IDS).last_hidden_state)
        other = IDS.clone()
        other[0, -1] = (other[0, -1] + 7) % 97
        changed = model(other).last_hidden_state
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=2e-3)
    assert not torch.equal(changed[:, 0], outs[1][:, 0])

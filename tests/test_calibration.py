"""Calibration: histograms against the reference, the fit against known curves, refusals."""

import json
import math

import pytest
import torch
from tiny_llama import tiny_llama

from flashskip import SkipSoftmaxConfig, reference
from flashskip.calibration import (
    Curve,
    Measurement,
    calibrate,
    cli,
    fit,
    histogram,
    misses,
    pooled,
    to_config,
    write_report,
)
from flashskip.calibration.measure import measure
from flashskip.geometry import Geometry
from flashskip.policy import Coefficients

PREFILL = Geometry.prefill(causal=True)


def bins(**counts):
    """A histogram with counts given by bin number: b0=5, b255=1."""
    gaps = torch.zeros(256, dtype=torch.int64)
    for name, count in counts.items():
        gaps[int(name[1:])] = count
    return gaps


# -- histograms and curves


@pytest.mark.parametrize(
    "geometry",
    [
        PREFILL,
        Geometry.prefill(causal=True, order="ascending", keys_per_vote=128),
        Geometry.prefill(causal=True, window_left=100),
        Geometry.decode(2),
    ],
)
def test_one_dense_pass_counts_what_every_threshold_skips(geometry):
    torch.manual_seed(0)
    qo_len = 3 if geometry.judged_against == "seed" else 400
    q = 4 * torch.randn(qo_len, 4, 32, dtype=torch.float64)
    k, v = torch.randn(2, 900, 2, 32, dtype=torch.float64)
    loudness = 2 * torch.rand(15)  # of the tiles; loud ones first and last, where seeds are
    loudness[[0, -1]] = 2.0
    k *= loudness.repeat_interleave(64)[:900, None, None]
    batch = {"qo_indptr": [0, qo_len], "kv_indptr": [0, 900], "geometry": geometry}
    dense = reference.attention(q, k, v, **batch)
    gaps = histogram(dense.skip_map[0])
    assert gaps.dtype == torch.int64
    assert gaps.shape == (4 // geometry.heads_per_vote, 256)
    assert torch.equal(gaps.sum(1), dense.counts[0, :, 1])
    curve = Curve(gaps)
    skipped_at_all = 0
    for edge in [-8, -4, -2, -1, -0.5, -0.125]:
        counts = reference.attention(q, k, v, **batch, thresholds=[2.0**edge]).counts[0]
        below = int((edge + 32) * 8)
        assert torch.equal(gaps[:, :below].sum(1), counts[:, 0])
        skipped, visited = counts.sum(0).tolist()
        assert curve.sparsity(edge) == pytest.approx(skipped / visited, abs=1e-12)
        skipped_at_all += skipped
    assert skipped_at_all > 0


def test_ends_of_the_histogram():
    # Never skipped: the first visited tile (a gap of infinity), and equal scores (a gap of 0).
    k = torch.zeros(64 * 3, 1, 16)
    k[:64] = 100.0
    batch = {"qo_indptr": [0, 64], "kv_indptr": [0, 192], "geometry": PREFILL}
    result = reference.attention(torch.ones(64, 1, 16), k, k, **batch)
    gaps = histogram(result.skip_map[0])
    assert gaps.sum() == result.counts[0, 0, 1]
    assert gaps[0, 1:255].sum() == 0
    assert gaps[0, 255] >= 1
    assert Curve(gaps).sparsity(-0.125) == gaps[0, 0] / gaps.sum()


def test_curve_reads_both_ways():
    curve = Curve(torch.stack([bins(b0=10, b100=30), bins(b200=40, b255=20)]))
    assert (curve.lowest, curve.highest) == (0.1, 0.8)
    assert curve.sparsity(-32 + 100 / 8) == pytest.approx(0.1)
    assert curve.sparsity(-32 + 100.5 / 8) == pytest.approx(0.25)
    assert curve.sparsity(-32 + 150 / 8) == pytest.approx(0.4)
    assert curve.sparsity(0.0) == curve.sparsity(-0.125) == pytest.approx(0.8)
    assert curve.log2_threshold(0.25) == pytest.approx(-32 + 100.5 / 8)
    assert curve.log2_threshold(0.4) == pytest.approx(-32 + 101 / 8)  # the lowest that reaches it
    assert curve.log2_threshold(0.8) == pytest.approx(-32 + 201 / 8)
    assert curve.log2_threshold(0.1) is None  # below what the histogram resolves
    assert curve.log2_threshold(0.81) is None


def test_pieces_of_a_text_are_pooled():
    def piece(text, kv_len, count):
        return Measurement(
            phase="prefill", text=text, kv_len=kv_len, gaps=bins(b3=count), geometry=PREFILL
        )

    found = pooled([piece("a", 10, 1), piece("b", 10, 2), piece("a", 10, 4), piece("a", 20, 8)])
    assert [(m.text, m.kv_len, int(m.gaps.sum())) for m in found] == [
        ("a", 10, 5),
        ("b", 10, 2),
        ("a", 20, 8),
    ]


@pytest.mark.parametrize(
    ("gaps", "message"),
    [
        (torch.zeros(255, dtype=torch.int64), "gaps is torch.int64"),
        (torch.ones(256), r"gaps is torch.float32 \(256,\)"),
        (torch.zeros(3, 256, dtype=torch.int64), "gaps holds no decisions"),
    ],
)
def test_what_is_no_histogram_is_refused(gaps, message):
    with pytest.raises(ValueError, match=message):
        Curve(gaps)


# -- the fit


def synthetic(a, b, c, kv_len, *, shift=0.0, phase="prefill", geometry=PREFILL, text="text"):
    """A text whose sparsity is exactly (ln(threshold) - ln(a) + c ln(L)) / b where that is 0..1."""
    first = (math.log(a) - c * math.log(kv_len) + shift) / math.log(2)
    last = first + b / math.log(2)
    edges = torch.linspace(-32, 0, 257, dtype=torch.float64)
    share = ((edges - first) / (last - first)).clamp(0, 1)
    counts = (share * 1_000_000).round().long().diff()
    counts[255] += 1_000_000 - counts.sum()
    return Measurement(phase=phase, text=text, kv_len=kv_len, gaps=counts, geometry=geometry)


LENGTHS = (2048, 4096, 8192)


@pytest.mark.parametrize(("a", "b", "c"), [(134.0, 7.0, 1.96), (7.93, 8.61, 1.0), (2e4, 12.0, 2.2)])
def test_recovers_the_coefficients(a, b, c):
    texts = [synthetic(a, b, c, length, text=f"{length}") for length in LENGTHS]
    x = fit(texts).coefficients
    assert (x.b, x.c) == (pytest.approx(b, rel=0.01), pytest.approx(c, abs=0.02))
    for target in (0.2, 0.5):
        expected = a * math.exp(b * target) / 4096**c
        assert x.threshold(target, 4096) == pytest.approx(expected, rel=0.02)
    assert x.r_squared > 0.999
    assert x.residual < 0.03
    assert x.length_range == (2048, 8192)
    assert x.sparsity_range[0] == 0.2
    assert x.measured_in == PREFILL


def test_noise_shows_in_the_fit_error():
    shifts = torch.randn(12, generator=torch.Generator().manual_seed(1)).tolist()
    texts = [
        synthetic(134.0, 7.0, 1.96, LENGTHS[i % 3], shift=0.4 * s) for i, s in enumerate(shifts)
    ]
    fitted = fit(texts)
    x = fitted.coefficients
    assert 0.15 < x.residual < 0.6
    assert 0.85 < x.r_squared < 0.99
    assert x.residual == pytest.approx(float(fitted.residuals.std()))
    assert float(fitted.residuals.mean()) == pytest.approx(0, abs=1e-9)


def test_one_length_or_a_given_exponent_leave_c_alone():
    same = [synthetic(134.0, 7.0, 1.96, length) for length in (4000, 4096)]
    assert fit(same).coefficients.c == 1.0
    texts = [synthetic(134.0, 7.0, 1.96, length) for length in LENGTHS]
    two = fit(texts, length_exponent=1.0).coefficients
    assert two.c == 1.0
    assert two.residual > fit(texts).coefficients.residual
    three = fit(texts, length_exponent=1.96).coefficients
    assert three.b == pytest.approx(7.0, rel=0.01)


def test_what_a_text_cannot_reach_is_left_out_and_reported():
    texts = [synthetic(134.0, 7.0, 1.0, length) for length in (400, 1024, 4096)]
    fitted = fit(texts)
    highest = {m.kv_len: m.curve.highest for m in texts}
    assert highest[400] < 0.15 < highest[1024] < highest[4096] < 0.55
    for length in highest:
        at = fitted.lengths == length
        assert (fitted.targets[at] <= highest[length]).all()
    assert fitted.coefficients.sparsity_range[1] <= highest[4096]
    with pytest.raises(ValueError, match=r"target_sparsity is 0.7, outside what"):
        fitted.coefficients.factor(0.7)


def test_misses_on_held_out_texts():
    x = fit([synthetic(134.0, 7.0, 1.96, length) for length in LENGTHS]).coefficients
    held_out = [
        synthetic(134.0, 7.0, 1.96, 4096, text="same"),
        synthetic(134.0, 7.0, 1.96, 4096, text="harder", shift=0.7),
    ]
    found = misses(x, held_out, (0.3, 0.5))
    assert [(m.text, m.target, m.kv_len) for m in found] == [
        ("same", 0.3, 4096),
        ("same", 0.5, 4096),
        ("harder", 0.3, 4096),
        ("harder", 0.5, 4096),
    ]
    errors = [m.error for m in found]
    assert errors == pytest.approx([0, 0, -0.1, -0.1], abs=0.01)  # 0.7 nats of 7 per unit
    assert not any(m.capped for m in found)


def test_misses_clamp_where_the_threshold_would_exceed_1():
    curve = Coefficients(a=134.0, b=7.0)
    text = synthetic(134.0, 7.0, 1.0, 1024)
    [miss] = misses(curve, [text], [0.7])
    assert miss.capped
    assert miss.achieved == text.curve.highest


def test_mixing_is_refused():
    prefill = synthetic(134.0, 7.0, 1.96, 2048, text="one")
    decode = synthetic(134.0, 7.0, 1.96, 4096, phase="decode", text="two")
    with pytest.raises(ValueError, match="'one' is prefill and 'two' is decode; expected one"):
        fit([prefill, decode])
    for geometry in (
        Geometry.prefill(causal=True, keys_per_vote=128),
        Geometry.prefill(causal=True, order="ascending"),
        Geometry.decode(3),
    ):
        other = synthetic(134.0, 7.0, 1.96, 4096, geometry=geometry, text="two")
        with pytest.raises(ValueError, match=r"'one' was measured in .* and 'two' in"):
            fit([prefill, other])
        with pytest.raises(ValueError, match="the geometry of the coefficients"):
            misses(fit([prefill]).coefficients, [other], [0.3])
    # A window does not change what decides together.
    window = Geometry.prefill(causal=True, window_left=512)
    fit([prefill, synthetic(134.0, 7.0, 1.96, 4096, geometry=window)])


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="there are no measurements"):
        fit([])
    with pytest.raises(ValueError, match="there are no measurements"):
        calibrate([])
    never = Measurement(phase="prefill", text="x", kv_len=10, gaps=bins(b255=10), geometry=PREFILL)
    with pytest.raises(ValueError, match="reach 0 of the targets"):
        fit([never])


def test_a_negative_exponent_is_refused():
    texts = [synthetic(1e-4, 7.0, -0.5, length) for length in LENGTHS]
    with pytest.raises(ValueError, match=r"exponent of the length is -0\.5.* length_exponent=1\.0"):
        fit(texts)


# -- export


def both_phases():
    decode = Geometry.decode(3)
    texts = [synthetic(134.0, 7.0, 1.96, length) for length in LENGTHS]
    texts += [
        synthetic(40.0, 9.0, 2.0, length, phase="decode", geometry=decode) for length in LENGTHS
    ]
    return texts


def test_export_into_a_checkpoint_and_back(tmp_path):
    fits = calibrate(both_phases())
    assert list(fits) == ["prefill", "decode"]
    config = to_config(fits, 0.5)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config.write_checkpoint(tmp_path)
    read = SkipSoftmaxConfig.from_checkpoint(tmp_path)
    assert read == config
    assert read.coefficients["decode"].measured_in == Geometry.decode(3)
    for phase, fitted in fits.items():
        options = read.options(phase)
        assert options == {
            "skip_softmax_threshold_scale_factor": fitted.coefficients.factor(0.5),
            "length_exponent": fitted.coefficients.c,
            "overflow": "clamp",
        }
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]


def test_two_parameter_form_is_what_others_read():
    config = to_config(calibrate(both_phases(), length_exponent=1.0), 0.5)
    [group] = config.to_checkpoint()["sparse_attention_config"]["config_groups"].values()
    factor = group["threshold_scale_factor"]
    assert factor["formula"] == "a * exp(b * target_sparsity)"
    assert set(factor["prefill"]) == set(factor["decode"]) == {"a", "b"}


def test_the_measured_order_goes_with_the_coefficients():
    ascending = Geometry.prefill(causal=True, order="ascending")
    texts = [synthetic(134.0, 7.0, 1.96, length, geometry=ascending) for length in LENGTHS]
    config = to_config(calibrate(texts), 0.4)
    assert config.options("prefill")["order"] == "ascending"
    assert config.options("decode") == {}


def test_a_target_beyond_the_measured_is_refused():
    with pytest.raises(ValueError, match=r"target_sparsity is 0\.99, outside"):
        to_config(calibrate(both_phases()), 0.99)


def test_report(tmp_path):
    pytest.importorskip("matplotlib")
    texts = both_phases()
    page = write_report(calibrate(texts), texts, tmp_path / "report", held_out=texts[:1])
    text = page.read_text()
    assert "## prefill" in text
    assert "order diagonal_sink_descending, 64 rows of 1 head x 64 keys" in text
    assert "seeded, 64 rows of 3 heads x 64 keys" in text
    assert "### Held-out texts" in text
    for name in ("prefill_sparsity", "prefill_residuals", "decode_sparsity", "decode_residuals"):
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# -- a model


@pytest.mark.llm
def test_measures_a_model_and_leaves_it_as_it_was():
    model = tiny_llama()
    tokens = torch.randint(97, (1, 304))
    with torch.no_grad():
        before = model(tokens).logits
    pieces = [("random", tokens)]
    prefill, decode = measure(model, pieces, decode_steps=4)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)
    assert (prefill.kv_len, decode.kv_len) == (304, 290)  # steps at 276, 285, 294 and 303
    assert prefill.gaps.shape == (2, 6, 256)
    assert decode.gaps.shape == (2, 2, 256)
    # 304 rows are 5 units; unit i of 64 rows sees i + 1 tiles; 5 tiles of keys in decode.
    assert prefill.gaps.sum(-1).tolist() == [[1 + 2 + 3 + 4 + 5] * 6] * 2
    assert decode.gaps.sum(-1).tolist() == [[4 * 5] * 2] * 2
    assert decode.geometry == Geometry.decode(3)
    # Each step is what comes of the text that ends there, and of one token after another.
    ends = [("cut", tokens[:, : p + 1]) for p in (276, 285, 294, 303)]
    alone = [m.gaps for m in measure(model, ends, phases=["decode"], decode_steps=1)]
    assert torch.equal(sum(alone), decode.gaps)


@pytest.mark.llm
def test_one_text_at_a_time_is_measured():
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"two is \(2, 8\); expected tokens \(1, length\)"):
        next(measure(model, [("two", torch.zeros(2, 8, dtype=torch.int64))]))
    with pytest.raises(ValueError, match="decode_steps is 0"):
        next(measure(model, [("x", torch.zeros(1, 8, dtype=torch.int64))], decode_steps=0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--target", "1.5"], "1.5 is no share; expected a number between 0 and 1"),
        (["--phases", "prefill,foo"], "'foo' is no phase; expected prefill and decode"),
        (["--lengths", "2048,0"], "'0' is no length; expected tokens, at least 1"),
        (["--lengths", "2k"], "'2k' is no length; expected tokens, at least 1"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(given, said, capsys):
    with pytest.raises(SystemExit):
        cli.main(given)
    assert said in capsys.readouterr().err


@pytest.mark.llm
def test_command(tmp_path, monkeypatch, capsys):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 300  # sharp heads: something to skip

    def tokenizer(text, add_special_tokens):
        return {"input_ids": [ord(c) % 97 for c in text]}

    monkeypatch.setattr(cli, "_load", lambda *_: (model, tokenizer))
    generator = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        letters = torch.randint(33, 126, (1100,), generator=generator)
        for start in range(0, 1100, 100):  # quiet tiles: decode votes by three heads
            letters[start + 20 : start + 100] = letters[start + 20]
        (tmp_path / f"{name}.txt").write_text("".join(map(chr, letters.tolist())))
    (tmp_path / "config.json").write_text("{}")
    arguments = {
        "--texts": tmp_path / "a.txt",
        "--held-out": tmp_path / "b.txt",
        "--lengths": "500,1000,2000",
        "--phases": "decode",
        "--decode-steps": "3",
        "--target": "0.3",
        "--out": tmp_path / "sparse.json",
        "--export": tmp_path / "config.json",
    }
    argv = [str(x) for pair in arguments.items() for x in pair]
    assert cli.main([*argv, "--two-parameter"]) == 0
    out, err = capsys.readouterr()
    assert "decode: threshold = " in out
    assert "decode of b (959 keys): 0." in out
    assert "a has 1100 tokens, too few for 2000" in err
    config = SkipSoftmaxConfig.from_checkpoint(tmp_path / "sparse.json")
    assert config == SkipSoftmaxConfig.from_checkpoint(tmp_path)
    assert config.coefficients["decode"].length_range == (479, 959)
    assert config.target_sparsity == {"decode": 0.3}


def test_a_model_that_cannot_be_loaded_is_named(monkeypatch):
    def refuse(model, device):
        raise OSError("no such repository")

    monkeypatch.setattr(cli, "_load", refuse)
    message = "--model is '/nowhere', which cannot be loaded .no such repository.; expected a model"
    with pytest.raises(ValueError, match=message):
        cli.main(["--model", "/nowhere", "--out", "x.json"])

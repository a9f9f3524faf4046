"""SkipSoftmaxConfig: what plan() gets, precedence, refusals by key, layers, calibrated figures."""

import dataclasses
import math

import pytest
import torch

import flashskip
from flashskip import SkipSoftmaxConfig, reference
from flashskip.geometry import Geometry
from flashskip.policy import Coefficients

FACTOR = "skip_softmax_threshold_scale_factor"
CURVE = Coefficients(a=100.0, b=5.0)


def test_threshold_is_passed_as_it_is():
    config = SkipSoftmaxConfig(threshold=0.25)
    for phase in ("prefill", "decode"):
        assert config.options(phase) == {"skip_softmax_threshold": 0.25}


def test_zero_is_a_skip_kernel_and_none_is_dense():
    assert SkipSoftmaxConfig(threshold=0.0).options("prefill") == {"skip_softmax_threshold": 0.0}
    assert SkipSoftmaxConfig().options("prefill") == {}


@pytest.mark.parametrize("value", [{"prefill": 10.0}, {"prefill": 10.0, "decode": None}])
def test_a_phase_that_is_not_named_is_dense(value):
    config = SkipSoftmaxConfig(threshold_scale_factor=value)
    assert config.options("prefill")[FACTOR] == 10.0
    assert config.options("decode") == {}


def test_phases_may_take_different_sources():
    config = SkipSoftmaxConfig(
        threshold={"prefill": 0.1}, target_sparsity={"decode": 0.5}, coefficients=CURVE
    )
    assert config.options("prefill") == {"skip_softmax_threshold": 0.1}
    assert config.options("decode")[FACTOR] == pytest.approx(100 * math.exp(2.5))


def test_factor_goes_with_exponent_and_overflow():
    assert SkipSoftmaxConfig(threshold_scale_factor=7.0).options("decode") == {
        FACTOR: 7.0,
        "length_exponent": 1.0,
        "overflow": "dense",
    }
    curve = Coefficients(a=100.0, b=5.0, c=1.9)
    config = SkipSoftmaxConfig(target_sparsity=0.4, coefficients=curve, overflow="clamp")
    options = config.options("decode")
    assert options["length_exponent"] == 1.9
    assert options["overflow"] == "clamp"


def test_order_goes_to_prefill_only_and_only_where_it_skips():
    config = SkipSoftmaxConfig(threshold={"prefill": 0.1}, order="ascending")
    assert config.options("prefill")["order"] == "ascending"
    assert SkipSoftmaxConfig(threshold=0.1, order="ascending").options("decode") == {
        "skip_softmax_threshold": 0.1
    }
    assert SkipSoftmaxConfig(order="ascending").options("prefill") == {}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "config",
    [
        SkipSoftmaxConfig(threshold=0.3, order="descending"),
        SkipSoftmaxConfig(threshold_scale_factor=30.0, overflow="clamp"),
        SkipSoftmaxConfig(target_sparsity=0.5, coefficients=CURVE),
    ],
)
def test_plan_takes_the_options(config, phase):
    indptr = torch.tensor([0, 64], dtype=torch.int32)
    options = {"q_data_type": torch.bfloat16, **config.options(phase)}
    if phase == "prefill":
        flashskip.BatchPrefillWrapper(torch.empty(0)).plan(indptr, indptr, 2, 1, 64, **options)
    else:
        pages = torch.tensor([0], dtype=torch.int32)
        last = torch.tensor([64], dtype=torch.int32)
        wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
        wrapper.plan(torch.tensor([0, 1], dtype=torch.int32), pages, last, 2, 1, 64, 64, **options)


REFUSED = [
    ({"threshold": 1.5}, ValueError, r"threshold is 1.5; .* >= 0 and <= 1"),
    ({"threshold": -0.1}, ValueError, "threshold is -0.1"),
    ({"threshold": math.nan}, ValueError, "threshold is nan"),
    ({"threshold": "0.1"}, TypeError, "threshold is '0.1'"),
    ({"threshold": {"prefill": 2.0}}, ValueError, r"threshold\['prefill'\] is 2.0"),
    ({"threshold": {"both": 0.1}}, ValueError, "threshold has the key 'both'; .*'prefill'"),
    ({"threshold_scale_factor": -1.0}, ValueError, "threshold_scale_factor is -1.0"),
    ({"threshold_scale_factor": math.inf}, ValueError, "threshold_scale_factor is inf"),
    ({"target_sparsity": 1.01}, ValueError, "target_sparsity is 1.01"),
    ({"disabled_until_timestep": 1.1}, ValueError, "disabled_until_timestep is 1.1"),
    ({"overflow": "panic"}, ValueError, "overflow is 'panic'; .*'dense', 'clamp'"),
    ({"overflow": "clamp"}, ValueError, "overflow is given without a scale factor"),
    ({"threshold": 0.1, "overflow": "clamp"}, ValueError, "overflow is given without"),
    ({"order": "random"}, ValueError, "order is 'random'; expected one of"),
    ({"ignore": "layers.0"}, TypeError, "ignore is 'layers.0'; expected a sequence"),
    (
        {"threshold": 0.1, "threshold_scale_factor": 5.0},
        ValueError,
        "threshold and threshold_scale_factor are both given for prefill",
    ),
    (
        {"threshold_scale_factor": 5.0, "target_sparsity": {"decode": 0.5}},
        ValueError,
        "threshold_scale_factor and target_sparsity are both given for decode",
    ),
    ({"coefficients": {"video": CURVE}}, ValueError, "coefficients has the key 'video'"),
    (
        {"threshold": 0.1, "components": {"transformer": SkipSoftmaxConfig()}},
        ValueError,
        "threshold is given together with components",
    ),
    ({"components": ["transformer"]}, TypeError, "components is .'transformer'.; expected a map"),
    ({"components": {"transformer": None}}, TypeError, "components is .*; expected a mapping"),
    ({"components": {"transformer": 0.1}}, TypeError, "components is .*; expected a mapping"),
]


@pytest.mark.parametrize(("fields", "error", "message"), REFUSED)
def test_refusals_name_the_key(fields, error, message):
    with pytest.raises(error, match=message):
        SkipSoftmaxConfig(**fields)


def test_target_without_coefficients_names_the_alternative():
    config = SkipSoftmaxConfig(target_sparsity=0.5, coefficients={"prefill": CURVE})
    with pytest.raises(ValueError, match=r"no coefficients for it.* pass threshold"):
        config.options("decode")


def test_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="phase is 'both'; expected one of 'prefill', 'decode'"):
        SkipSoftmaxConfig(threshold=0.1).options("both")


@pytest.mark.parametrize(
    ("layer", "component", "dense"),
    [
        ("blocks.0.attn1", None, True),
        ("blocks.0.attn1.core", None, True),  # a child
        ("blocks.1.attn1", None, False),
        ("blocks.10.attn2", None, True),  # a pattern
        ("transformer.blocks.0.attn1", "transformer", True),
        ("transformer.blocks.0.attn1", None, False),
        ("xblocks.0.attn1", None, False),
    ],
)
def test_ignored_layers_are_dense(layer, component, dense):
    config = SkipSoftmaxConfig(threshold=0.1, ignore=["blocks.0", "*.attn2"])
    assert (config.options("prefill", layer, component) == {}) is dense


def test_ignore_needs_the_layer():
    with pytest.raises(ValueError, match="layer is None and ignore names layers"):
        SkipSoftmaxConfig(threshold=0.1, ignore=["blocks.0"]).options("prefill")


def test_components_have_configurations_of_their_own():
    config = SkipSoftmaxConfig(
        components={
            "transformer": SkipSoftmaxConfig(threshold=0.1),
            "transformer_2": SkipSoftmaxConfig(threshold=0.2),
        }
    )
    thresholds = [
        config.options("prefill", component=name)["skip_softmax_threshold"]
        for name in config.components
    ]
    assert thresholds == [0.1, 0.2]
    for name in (None, "vae"):
        with pytest.raises(ValueError, match=r"component is .*; expected one of 'transformer'"):
            config.options("prefill", component=name)


# -- figures of published calibrations

QWEN_PREFILL = [18.76, 44.37, 104.97, 248.40, 587.18, 1390.63, 3293.04, 7799.91, 18471.56]
QWEN_DECODE = [0.32, 0.86, 2.30, 6.17, 16.52, 44.26, 118.62, 317.99, 852.20]
QWEN = SkipSoftmaxConfig(
    coefficients={"prefill": Coefficients(a=7.93, b=8.61), "decode": Coefficients(a=0.12, b=9.85)}
)


@pytest.mark.parametrize(("phase", "factors"), [("prefill", QWEN_PREFILL), ("decode", QWEN_DECODE)])
def test_qwen3_30b_factors(phase, factors):
    for i, published in enumerate(factors):
        config = dataclasses.replace(QWEN, target_sparsity=(i + 1) / 10)
        # The page prints a and b with three digits and the smallest factor with two.
        assert config.options(phase)[FACTOR] == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("phase", "kv_len", "published"),
    [
        ("prefill", 131072, [1.4e-4, 3.4e-4, 8.0e-4, 1.9e-3, 4.5e-3, 1.1e-2, 2.5e-2, 6.0e-2, 0.14]),
        ("prefill", 1024, [0.018, 0.043, 0.10, 0.24, 0.57, 1.36, 3.2, 7.6, 18]),
        (
            "decode",
            131072,
            [2.4e-6, 6.6e-6, 1.8e-5, 4.7e-5, 1.3e-4, 3.4e-4, 9.1e-4, 2.4e-3, 6.5e-3],
        ),
    ],
)
def test_qwen3_30b_thresholds_and_overflow(phase, kv_len, published):
    for i, expected in enumerate(published):
        config = dataclasses.replace(QWEN, target_sparsity=(i + 1) / 10)
        curve = config.coefficients[phase]
        # Two digits are printed: within half of the last one, and the rounding of a and b.
        assert curve.threshold((i + 1) / 10, kv_len) == pytest.approx(expected, rel=0.04)
        final = {}
        for overflow in ("dense", "clamp"):
            options = dataclasses.replace(config, overflow=overflow).options(phase)
            [final[overflow]] = reference.final_thresholds(
                [kv_len],
                scale_factor=options[FACTOR],
                length_exponent=options["length_exponent"],
                overflow=options["overflow"],
            )
        if expected >= 1:
            assert final == {"dense": None, "clamp": 1.0}
        else:
            assert final["dense"] == final["clamp"] == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    ("target", "published"), [(0.5, 0.335), (0.65, 0.647), (0.7, 0.806), (0.75, 1.003), (0.8, 1.25)]
)
def test_wan22_thresholds_and_overflow(target, published):
    curve = Coefficients(a=2822.6209952221557, b=4.388250623520793)
    assert curve.threshold(target, 75_600) == pytest.approx(
        published, abs=0.0006 * published + 5e-4
    )
    config = SkipSoftmaxConfig(target_sparsity=target, coefficients=curve)
    for overflow, beyond in (("dense", None), ("clamp", 1.0)):
        options = dataclasses.replace(config, overflow=overflow).options("prefill")
        [final] = reference.final_thresholds(
            [75_600], scale_factor=options[FACTOR], overflow=options["overflow"]
        )
        assert final == (beyond if published >= 1 else pytest.approx(published, rel=2e-3))


# -- limits of a calibration

MEASURED = Coefficients(
    a=100.0,
    b=5.0,
    c=2.0,
    sparsity_range=(0.1, 0.8),
    length_range=(2048, 8192),
    measured_in=Geometry.prefill(causal=True),
)


@pytest.mark.parametrize("target", [0.05, 0.81])
def test_targets_outside_the_measured_range_are_refused(target):
    config = SkipSoftmaxConfig(target_sparsity=target, coefficients=MEASURED)
    with pytest.raises(ValueError, match=r"target_sparsity is .*; expected 0.1 to 0.8"):
        config.options("prefill")


@pytest.mark.parametrize("target", [0.1, 0.8])
def test_the_limits_of_the_measured_range_are_inside(target):
    assert MEASURED.factor(target) == pytest.approx(100 * math.exp(5 * target))


def test_another_order_warns_once_and_names_both():
    curve = dataclasses.replace(MEASURED, measured_in=Geometry.prefill(order="ascending"))
    config = SkipSoftmaxConfig(target_sparsity=0.5, coefficients=curve)
    with pytest.warns(UserWarning, match="order ascending, .*order diagonal_sink_descending"):
        config.options("prefill")
    config.options("prefill")  # once: a second warning would be an error here
    dataclasses.replace(config, order="ascending").options("prefill")
    SkipSoftmaxConfig(target_sparsity=0.5, coefficients=MEASURED).options("prefill")


def test_check_names_both_geometries_and_the_lengths():
    config = SkipSoftmaxConfig(target_sparsity=0.5, coefficients=MEASURED)
    config.check("prefill", Geometry.prefill(causal=True, window_left=5), kv_len=2048)
    with pytest.warns(UserWarning, match=r"1 head x 64 keys\).*1 head x 128 keys\)"):
        config.check("prefill", Geometry.prefill(keys_per_vote=128))
    with pytest.warns(UserWarning, match="2048 to 8192 keys"):
        config.check("prefill", Geometry.prefill(), kv_len=8193)
    SkipSoftmaxConfig(threshold=0.5).check("prefill", Geometry.prefill(keys_per_vote=128))


GATED = SkipSoftmaxConfig(threshold=0.1, disabled_until_timestep=0.5)
CALLS = [
    (lambda: GATED.options("prefill", batch_size="2"), "batch_size is '2'; expected an int"),
    (lambda: GATED.options("prefill", batch_size=-1), "batch_size is -1; expected at least 0"),
    (lambda: GATED.options("prefill", batch_size=1, device="foo"), "device is 'foo'; expected"),
    (lambda: GATED.options("prefill", layer=3), "layer is 3; expected str or None"),
    (lambda: GATED.options("prefill", component=3), "component is 3; expected str or None"),
    (lambda: GATED.check("prefil", Geometry.prefill()), "phase is 'prefil'; expected one of"),
    (lambda: GATED.check("prefill", None), "geometry is None; expected a Geometry"),
    (lambda: GATED.check("prefill", Geometry.prefill(), kv_len="x"), "kv_len is 'x'; expected an"),
    (lambda: SkipSoftmaxConfig.from_checkpoint(None), "source is None; expected a mapping"),
    (lambda: SkipSoftmaxConfig.from_tensorrt_llm(7), "source is 7; expected a mapping"),
    (lambda: SkipSoftmaxConfig.from_vllm_omni(7), "source is 7; expected a mapping"),
    (lambda: SkipSoftmaxConfig.from_checkpoint({}, user={}), "user is {}; expected SkipSoftmaxC"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls_name_what_is_wrong(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": 0.0, "b": 1.0}, "a is 0.0; expected a finite number > 0"),
        ({"a": -1.0, "b": 1.0}, "a is -1.0"),
        ({"a": 1.0, "b": math.nan}, "b is nan"),
        ({"a": 1.0, "b": 1.0, "c": -1.0}, "c is -1.0"),
        ({"a": 1.0, "b": 1.0, "sparsity_range": (0.5, 0.1)}, "sparsity_range is"),
    ],
)
def test_coefficients_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        Coefficients(**fields)


def test_a_factor_too_large_for_float32_is_refused():
    with pytest.raises(ValueError, match="fits in float32"):
        Coefficients(a=1e30, b=100.0).factor(0.9)

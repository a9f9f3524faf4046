"""plan()'s options: each refusal names the argument, what was found and expected."""

import inspect
import math

import pytest
import torch

import flashskip
from flashskip._options import PlanOptions

BF16 = torch.bfloat16

REFUSED = [
    ({"q_data_type": "bf16"}, TypeError, "q_data_type is 'bf16'; expected a torch.dtype"),
    ({"q_data_type": torch.float64}, ValueError, "q_data_type is torch.float64; expected torch.b"),
    ({"o_data_type": torch.float8_e4m3fn}, ValueError, "o_data_type is torch.float8_e4m3fn; exp"),
    ({"kv_data_type": torch.float8_e5m2}, ValueError, "kv_data_type is torch.float8_e5m2; expec"),
    ({"kv_data_type": torch.float32}, ValueError, "kv_data_type is torch.float32 and q_data_typ"),
    ({"sm_scale": 0.0}, ValueError, "sm_scale is 0.0; expected a finite number >= 1e-15"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale is nan"),
    ({"sm_scale": math.inf}, ValueError, "sm_scale is inf"),
    (
        {"logits_soft_cap": -1.0},
        ValueError,
        "logits_soft_cap is -1.0; expected 0 or a finite number >= 1e-15",
    ),
    ({"window_left": -2}, ValueError, "window_left is -2; expected -1"),
    ({"window_left": 2**30 + 1}, ValueError, "window_left is 1073741825; expected -1"),
    ({"skip_softmax_threshold": math.nan}, ValueError, "skip_softmax_threshold is nan"),
    (
        {"skip_softmax_threshold": -0.1},
        ValueError,
        "skip_softmax_threshold is -0.1; .* >= 0 and <= 1",
    ),
    ({"skip_softmax_threshold": 1.5}, ValueError, "skip_softmax_threshold is 1.5; .* <= 1"),
    ({"skip_softmax_threshold": math.inf}, ValueError, "skip_softmax_threshold is inf"),
    ({"skip_softmax_threshold": True}, TypeError, "skip_softmax_threshold is True"),
    (
        {"skip_softmax_threshold_scale_factor": -1.0},
        ValueError,
        "skip_softmax_threshold_scale_factor is -1.0",
    ),
    (
        {"skip_softmax_threshold": 0.1, "skip_softmax_threshold_scale_factor": 5.0},
        ValueError,
        "both given; expected one source",
    ),
    ({"overflow": "panic"}, ValueError, "overflow is 'panic'; expected one of 'dense', 'clamp'"),
    (
        {"skip_softmax_threshold": 0.1, "overflow": "clamp"},
        ValueError,
        "overflow is given without a scale factor",
    ),
    (
        {"skip_softmax_threshold": 0.1, "length_exponent": 2.0},
        ValueError,
        "length_exponent is given without a scale factor",
    ),
    (
        {"threshold_kv_len": torch.ones(2, dtype=torch.int32)},
        ValueError,
        "threshold_kv_len is given without a scale factor",
    ),
    ({"collect_stats": True}, ValueError, "collect_stats is given without a skip test"),
    ({"collect_bound": True}, ValueError, "collect_bound is given without a skip test"),
    ({"vote_kv": 64}, ValueError, "vote_kv is given without a skip test"),
    ({"order": "ascending"}, ValueError, "order is given without a skip test"),
    (
        {"skip_criterion": "measure", "collect_stats": True},
        ValueError,
        "collect_stats is given without a skip test",
    ),
    (
        {"skip_criterion": "measure", "collect_bound": True},
        ValueError,
        "collect_bound is given without a skip test",
    ),
    ({"skip_softmax_threshold": 0.1, "vote_kv": 32}, ValueError, "vote_kv is 32; expected one of"),
    ({"skip_softmax_threshold": 0.1, "order": "up"}, ValueError, "order is 'up'; expected one of"),
    ({"skip_criterion": "budget"}, ValueError, "skip_budget is None with skip_criterion='budget'"),
    ({"skip_budget": 0.1}, ValueError, "skip_budget is 0.1 with skip_criterion='threshold'"),
    (
        {"skip_criterion": "measure", "skip_softmax_threshold": 0.1},
        ValueError,
        "skip_criterion is 'measure' and a threshold is given",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_a_wrong_option_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        PlanOptions(**{"q_data_type": BF16, **options})


def test_plan_lists_its_options_and_refuses_others():
    for wrapper in (flashskip.BatchPrefillWrapper, flashskip.BatchDecodeWrapper):
        names = inspect.signature(wrapper.plan).parameters
        assert "skip_softmax_threshold" in names
        assert "options" not in names
    indptr = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="got 'skip_threshold'; expected one of"):
        flashskip.BatchPrefillWrapper().plan(
            indptr, indptr, 2, 1, 64, q_data_type=BF16, skip_threshold=1
        )


def test_a_plan_without_the_element_type_says_what_to_pass():
    indptr = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"got no q_data_type; expected .* q_data_type=q\.dtype"):
        flashskip.BatchPrefillWrapper().plan(indptr, indptr, 2, 1, 64)


def test_the_criterion_is_dense_only_without_any_test():
    assert PlanOptions(q_data_type=BF16).criterion == "dense"
    assert PlanOptions(q_data_type=BF16, skip_softmax_threshold=0.0).criterion == "threshold"
    measuring = PlanOptions(
        q_data_type=BF16, skip_criterion="measure", vote_kv=128, order="ascending"
    )
    assert measuring.criterion == "measure"
    assert measuring.decides
    assert not measuring.skips


def test_the_default_scale_is_that_of_the_head_dim():
    assert PlanOptions(q_data_type=BF16).scale(64) == 0.125
    assert PlanOptions(q_data_type=BF16, sm_scale=1).scale(64) == 1.0

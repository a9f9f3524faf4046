"""The gate of diffusion steps: equality, contexts, live tensors, one warning."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import flashskip
from flashskip import DenoiseProgress, SkipSoftmaxConfig, record_denoise_step
from flashskip.policy import Coefficients

SCHEDULER = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
KEY = "skip_softmax_threshold"


@pytest.fixture(autouse=True)
def progress():
    with DenoiseProgress() as progress:
        yield progress


def gated(gate, threshold=0.5, batch_size=2):
    config = SkipSoftmaxConfig(threshold=threshold, disabled_until_timestep=gate)
    return config.options("prefill", batch_size=batch_size, device="cpu")[KEY]


@pytest.mark.parametrize(
    ("gate", "t", "sparse"),
    [
        (0.93, 0.931, False),
        (0.93, 0.93, True),  # equality is sparse
        (0.93, 0.93 + 5e-7, True),  # so is what rounds to it
        (0.93, 0.93 + 3e-6, False),
        (0.93, 0.5, True),
        (1.0, 1.0, True),
        (0.0, 0.0, True),
        (0.0, 0.001, False),
        (0.7, 0.7, True),
        (0.1, 0.1, True),
    ],
)
@pytest.mark.parametrize("kind", ["float", "tensor", "vector"])
def test_gate(gate, t, sparse, kind):
    given = t if kind == "float" else torch.full((2,) if kind == "vector" else (), t)
    record_denoise_step(0, normalized_timestep=given)
    assert gated(gate).tolist() == [0.5 if sparse else 0.0] * 2


@pytest.mark.parametrize("step", range(0, 1001, 7))
def test_host_and_device_comparisons_agree_at_equality(step):
    live = gated_quietly(step / 1000)
    for t in (step, torch.tensor([step, step])):  # a vector is compared by tensor arithmetic
        record_denoise_step(0, timestep=t, num_train_timesteps=1000)
        assert live.tolist() == [0.5, 0.5]


def gated_quietly(gate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gated(gate)


@pytest.mark.parametrize(
    "source",
    [
        {"timestep": 930, "scheduler": SCHEDULER},
        {"timestep": torch.tensor(930), "scheduler": SCHEDULER},
        {"timestep": torch.tensor([930.0]), "num_train_timesteps": 1000},
        {"normalized_timestep": 0.93},
    ],
)
def test_sources_of_a_timestep(source):
    record_denoise_step(3, **source)
    assert gated(0.93).tolist() == [0.5, 0.5]
    assert gated(0.92).tolist() == [0.0, 0.0]


def test_states_change_in_place_for_every_layer(progress):
    record_denoise_step(0, timestep=1000, scheduler=SCHEDULER)
    first, second = gated(0.9), gated(0.9)
    other = gated(0.9, threshold=0.25)
    assert first is second
    address = first.data_ptr()
    states = []
    for step, t in enumerate([950, 900, 100, 1000]):
        record_denoise_step(step, timestep=t, scheduler=SCHEDULER)
        states.append((first.tolist(), other.tolist()))
    dense, sparse = ([0.0, 0.0],) * 2, ([0.5, 0.5], [0.25, 0.25])
    assert states == [dense, sparse, sparse, dense]
    assert first.data_ptr() == address
    assert progress.step_idx == 3


def test_requests_may_be_at_different_steps():
    record_denoise_step(0, timestep=torch.tensor([950, 850]), scheduler=SCHEDULER)
    assert gated(0.9).tolist() == [0.0, 0.5]
    with pytest.raises(ValueError, match=r"timestep has 2 elements; expected 1 or 3"):
        gated(0.9, batch_size=3)


def test_a_nan_timestep_on_the_device_is_dense():
    record_denoise_step(0, normalized_timestep=torch.tensor([float("nan"), 0.1]))
    assert gated(0.9).tolist() == [0.0, 0.5]


def test_unpublished_is_dense_with_one_warning():
    with pytest.warns(UserWarning, match="no timestep has been published"):
        live = gated(0.9)
    gated(0.8)  # a second warning would be an error
    record_denoise_step(0)
    assert live.tolist() == [0.0, 0.0]
    record_denoise_step(1, normalized_timestep=0.1)
    assert live.tolist() == [0.5, 0.5]
    record_denoise_step(2)  # unknown again
    assert live.tolist() == [0.0, 0.0]


def test_the_step_index_decides_nothing():
    for step in (0, 10_000):
        record_denoise_step(step, normalized_timestep=0.95)
        assert gated(0.9).tolist() == [0.0, 0.0]


def test_without_a_gate_nothing_is_live():
    assert SkipSoftmaxConfig(threshold=0.5).options("prefill") == {KEY: 0.5}


def test_a_gated_factor_is_live_and_keeps_its_exponent():
    record_denoise_step(0, normalized_timestep=0.1)
    config = SkipSoftmaxConfig(
        target_sparsity=0.5,
        coefficients=Coefficients(a=2.0, b=1e-300, c=1.5),
        overflow="clamp",
        disabled_until_timestep=0.9,
    )
    options = config.options("prefill", batch_size=3, device="cpu")
    assert options.pop("skip_softmax_threshold_scale_factor").tolist() == [2.0] * 3
    assert options == {"length_exponent": 1.5, "overflow": "clamp"}


def test_a_gate_needs_the_batch_size():
    with pytest.raises(ValueError, match="batch_size is None with disabled_until_timestep"):
        SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=0.9).options("prefill")


def test_contexts_are_apart():
    record_denoise_step(0, normalized_timestep=0.1)
    outer = gated(0.9)
    with DenoiseProgress():
        record_denoise_step(0, normalized_timestep=1.0)
        inner = gated(0.9)
    assert (outer.tolist(), inner.tolist()) == ([0.5, 0.5], [0.0, 0.0])
    thread = threading.Thread(target=record_denoise_step, args=(0,), kwargs={"timestep": None})
    thread.start()
    thread.join()
    assert outer.tolist() == [0.5, 0.5]
    record_denoise_step(1, normalized_timestep=1.0)
    assert outer.tolist() == [0.0, 0.0]


def test_live_tensors_of_inference_mode_are_written_outside_of_it():
    with torch.inference_mode():
        record_denoise_step(0, normalized_timestep=1.0)
        live = gated(0.9)
        record_denoise_step(1, normalized_timestep=0.5)
    assert live.tolist() == [0.5, 0.5]
    record_denoise_step(2, normalized_timestep=1.0)
    assert live.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"timestep": 5}, "timestep is given with 0 of scheduler"),
        ({"num_train_timesteps": 5}, "timestep is missing with 1 of scheduler"),
        (
            {"timestep": 5, "num_train_timesteps": 9, "scheduler": SCHEDULER},
            "timestep is given with 2",
        ),
        ({"timestep": 5, "normalized_timestep": 0.5}, "normalized_timestep is given together"),
        ({"timestep": 1001, "scheduler": SCHEDULER}, "normalized timestep is 1.001; expected 0"),
        ({"normalized_timestep": float("nan")}, "normalized timestep is nan"),
        ({"timestep": 5, "num_train_timesteps": 0}, "num_train_timesteps is 0"),
        ({"timestep": 5, "scheduler": object()}, "scheduler is a object without config"),
    ],
)
def test_refusals(source, message):
    with pytest.raises(ValueError, match=message):
        record_denoise_step(0, **source)


def test_a_cuda_timestep_is_never_read_on_the_host():
    # Meta tensors stand in: they carry no values, and reading one on the host raises.
    record_denoise_step(0, timestep=torch.tensor(900, device="meta"), scheduler=SCHEDULER)
    config = SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=0.9)
    live = config.options("prefill", batch_size=3, device="meta")[KEY]
    vector = torch.tensor([900, 800, 700], device="meta")
    record_denoise_step(1, timestep=vector, num_train_timesteps=1000)
    record_denoise_step(2, normalized_timestep=torch.tensor(0.5, device="meta"))
    assert (live.device.type, live.dtype, tuple(live.shape)) == ("meta", torch.float32, (3,))


def test_one_plan_runs_dense_and_sparse():
    torch.manual_seed(0)
    q, k, v = (torch.randn(256, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    k[:64] *= 4
    indptr = torch.tensor([0, 256], dtype=torch.int32)
    record_denoise_step(0, normalized_timestep=1.0)
    config = SkipSoftmaxConfig(threshold=0.9, disabled_until_timestep=0.5)
    wrapper, dense = (flashskip.BatchPrefillWrapper(torch.empty(0)) for _ in range(2))
    dtype = {"q_data_type": q.dtype}
    dense.plan(indptr, indptr, 2, 2, 64, **dtype)
    options = config.options("prefill", batch_size=1, device="cpu")
    wrapper.plan(indptr, indptr, 2, 2, 64, **dtype, **options, collect_stats=True)
    assert torch.equal(wrapper.run(q, k, v), dense.run(q, k, v))
    assert wrapper.stats[..., 0].sum() == 0
    record_denoise_step(1, normalized_timestep=0.5)
    assert not torch.equal(wrapper.run(q, k, v), dense.run(q, k, v))
    assert wrapper.stats[..., 0].sum() > 0

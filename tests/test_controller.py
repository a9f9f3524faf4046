"""SparsityController: convergence, drift, limits, hysteresis, and a real wrapper."""

import math

import pytest
import torch

import flashskip
from flashskip import SparsityController

TILES = 10_000


class Data:
    """Tiles whose gaps are normal in ln(threshold), drifting by `drift` nats a step."""

    def __init__(self, middle, spread, drift=0.0, seed=0):
        self.middle, self.spread, self.drift = middle, spread, drift
        self.generator = torch.Generator().manual_seed(seed)

    def run(self, value, tiles=TILES):
        """Counters of one step at a threshold: int64 [1, 2, 2]."""
        gaps = self.middle + self.spread * torch.randn(2, tiles // 2, generator=self.generator)
        self.middle += self.drift
        skipped = (gaps < math.log(value)).sum(1)
        return torch.stack([skipped, torch.full_like(skipped, tiles // 2)], -1)[None]


def drive(controller, data, steps):
    """Sparsities of `steps` steps."""
    achieved = []
    for _ in range(steps):
        controller.update(data.run(float(controller.value[0])))
        achieved.append(float(controller.achieved))
    return achieved


@pytest.mark.parametrize("target", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("off_by", [0.1, 10.0])
@pytest.mark.parametrize("drift", [-0.02, 0.0, 0.02])
@pytest.mark.parametrize("spread", [2.0, 4.0])  # b of about 5 to 14 around the middle
def test_converges_within_20_steps_from_10_times_off(target, off_by, drift, spread):
    middle = math.log(200.0)
    right = math.exp(middle + spread * torch.special.ndtri(torch.tensor(target)).item())
    controller = SparsityController(
        target, threshold_scale_factor=right * off_by, device="cpu", batch_size=3
    )
    achieved = drive(controller, Data(middle, spread, drift), 40)
    assert abs(achieved[0] - target) > 0.12
    # The tolerance of 0.02, three sigma (0.015) of the counts, and a step of drift.
    assert max(abs(s - target) for s in achieved[20:]) <= 0.04
    assert len(set(controller.value.tolist())) == 1


@pytest.mark.parametrize("target", [0.2, 0.8])
def test_rests_at_a_limit_that_is_out_of_reach(target):
    controller = SparsityController(
        target, threshold_scale_factor=100.0, limits=(50.0, 200.0), device="cpu"
    )
    data = Data(math.log(100.0), 4.0)
    drive(controller, data, 30)
    limit = 200.0 if target > 0.5 else 50.0
    assert float(controller.value) == pytest.approx(limit, rel=1e-6)
    assert bool(controller.saturated)
    data.middle += math.log(20.0) if target < 0.5 else -math.log(20.0)  # comes within reach
    drive(controller, data, 20)
    assert not bool(controller.saturated)
    assert abs(float(controller.achieved) - target) <= 0.03


def test_a_threshold_stays_within_1():
    controller = SparsityController(0.9, threshold=0.5, device="cpu")
    drive(controller, Data(3.0, 1.0), 50)  # nearly every gap is beyond 1
    assert controller.value.tolist() == [1.0]
    assert bool(controller.saturated)
    assert controller.options()["skip_softmax_threshold"] is controller.value


def test_hysteresis():
    controller = SparsityController(0.5, threshold=0.1, tolerance=0.04, device="cpu")

    def moves(skipped):
        before = float(controller.value)
        controller.update(torch.tensor([skipped, 1000]))
        return float(controller.value) != before

    # Moving until within 0.02, then at rest until off by more than 0.04.
    assert [moves(n) for n in (400, 470, 485, 465, 535, 545, 530, 510, 530)] == [
        True,
        True,
        False,
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_nothing_moves_where_nothing_was_visited():
    controller = SparsityController(0.5, threshold=0.1, device="cpu")
    controller.update(torch.zeros(2, 4, 2, dtype=torch.int64))
    assert controller.value.tolist() == [pytest.approx(0.1)]
    assert torch.isnan(controller.achieved)


def test_layers_are_summed_and_the_address_is_kept():
    one, two = (SparsityController(0.5, threshold=0.1, device="cpu") for _ in range(2))
    address = one.value.data_ptr()
    one.update(torch.tensor([[10, 100]]), torch.tensor([[[50, 300]]]))
    two.update(torch.tensor([60, 400]))
    assert one.value.tolist() == two.value.tolist() != [pytest.approx(0.1)]
    assert one.value.data_ptr() == address
    assert float(one.achieved) == pytest.approx(0.15)


def test_value_is_written_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        controller = SparsityController(0.5, threshold=0.1, device="cpu")
        controller.update(torch.tensor([0, 100]))
    controller.update(torch.tensor([0, 100]))
    assert float(controller.value) > 0.1


def test_counters_on_a_gpu_are_never_read_on_the_host():
    # Meta tensors stand in: they carry no values, and reading one on the host raises.
    controller = SparsityController(0.5, threshold=0.1, batch_size=3, device="meta")
    stats = torch.zeros(3, 8, 2, dtype=torch.int64, device="meta")
    controller.update(stats, stats)
    assert controller.value.device.type == "meta"


def test_steers_a_wrapper():
    torch.manual_seed(0)
    batch_size, length = 2, 2048
    indptr = torch.arange(batch_size + 1, dtype=torch.int32)
    last = torch.full((batch_size,), length, dtype=torch.int32)
    controller = SparsityController(
        0.5, threshold_scale_factor=0.02 * length, batch_size=batch_size, device="cpu", slope=6.0
    )
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    options = controller.options()
    wrapper.plan(indptr, indptr[:-1], last, 8, 2, 64, length, q_data_type=torch.float16, **options)
    cache = torch.randn(batch_size, 2, length, 2, 64, dtype=torch.float16)
    cache[:, 0, :64] *= 2  # seeds well above the other tiles
    q = torch.randn(batch_size, 8, 64, dtype=torch.float16)
    for step in range(20):
        wrapper.run((2 + 0.01 * step) * q, cache)
        controller.update(wrapper.stats)
        wrapper.reset_stats()
    assert abs(float(controller.achieved) - 0.5) <= 0.03  # 128 decisions: steps of 0.008


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "threshold is None and threshold_scale_factor is None; expected exactly one"),
        ({"threshold": 0.1, "threshold_scale_factor": 1.0}, "expected exactly one"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"threshold": 2.0}, "threshold is 2.0"),
        ({"threshold": 0.1, "length_exponent": 2.0}, "length_exponent is given with threshold"),
        ({"threshold": 0.1, "limits": (0.2, 0.3)}, "threshold is 0.1 with limits"),
        ({"threshold": 0.1, "limits": (0.01, 2.0)}, "limits is 2.0"),
        ({"threshold": 0.1, "gain": 0.0}, "gain is 0.0"),
        ({"threshold": 0.1, "target_sparsity": 1.5}, "target_sparsity is 1.5"),
        ({"threshold": 0.1, "limits": (0.01, 0.2, 0.3)}, "limits is .0.01, 0.2, 0.3.; expected"),
        ({"threshold": 0.1, "limits": 0.3}, "limits is 0.3; expected the lowest and"),
        ({"threshold": 0.1, "batch_size": -1}, "batch_size is -1; expected at least 0"),
        ({"threshold": 0.1, "batch_size": "2"}, "batch_size is '2'; expected an int"),
        ({"threshold": 0.1, "device": "foo"}, "device is 'foo'; expected 'cpu'"),
        ({"threshold": 0.1, "device": 7.5}, "device is 7.5; expected 'cpu'"),
        ({"threshold": 0.1, "device": "cuda:9"}, "device is 'cuda:9'; expected one of . GPUs"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SparsityController(**{"target_sparsity": 0.5, "device": "cpu", **arguments})


@pytest.mark.parametrize("stats", [(), (torch.zeros(3),), (torch.tensor(1),), ([1, 2],)])
def test_counters_are_checked(stats):
    with pytest.raises((ValueError, TypeError), match="expected"):
        SparsityController(0.5, threshold=0.1, device="cpu").update(*stats)

"""Cases from public bug reports about calibration files (Q02) and the gate of diffusion (D01)."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reported import on_both, prefill, prefill_variant, twin_peak

from flashskip import DenoiseProgress, SkipSoftmaxConfig, record_denoise_step
from flashskip.geometry import Geometry

FORMULA = "a * exp(b * target_sparsity)"


def checkpoint(factor: dict[str, Any], **group: Any) -> dict[str, Any]:
    """A config.json whose calibration is `factor`."""
    given = {
        "algorithm": "skip_softmax",
        "targets": ["Attention"],
        "threshold_scale_factor": {"formula": FORMULA, **factor},
        "target_sparsity": {"prefill": 0.5},
        **group,
    }
    return {"sparse_attention_config": {"config_groups": {"group_0": given}}}


def saved(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


def factor(path: Path | dict[str, Any]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = SkipSoftmaxConfig.from_checkpoint(path)
        return float(config.options("prefill")["skip_softmax_threshold_scale_factor"])


# ---- Q02 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", ["a * b ** target_sparsity", "", None, 3])
def test_reported_Q02_an_unknown_formula_is_refused(tmp_path: Path, formula: object) -> None:
    content = checkpoint({"formula": formula, "prefill": {"a": 7.93, "b": 8.61}})
    with pytest.raises((ValueError, TypeError), match="formula"):
        SkipSoftmaxConfig.from_checkpoint(saved(tmp_path, content))


def test_reported_Q02_a_missing_formula_is_refused_and_the_file_named(tmp_path: Path) -> None:
    content = checkpoint({"prefill": {"a": 7.93, "b": 8.61}})
    [group] = content["sparse_attention_config"]["config_groups"].values()
    del group["threshold_scale_factor"]["formula"]
    with pytest.raises(ValueError, match=r"config\.json.*formula is None"):
        SkipSoftmaxConfig.from_checkpoint(saved(tmp_path, content))


def test_reported_Q02_a_and_its_logarithm_mean_the_same(tmp_path: Path) -> None:
    both = {"a": 7.93, "log_a": math.log(7.93), "b": 8.61}
    spellings = [{k: both[k] for k in keys} for keys in (("a", "b"), ("log_a", "b"), tuple(both))]
    found = [factor(saved(tmp_path, checkpoint({"prefill": s}))) for s in spellings]
    assert found == pytest.approx([7.93 * math.exp(8.61 * 0.5)] * 3, rel=1e-12)
    with pytest.raises(ValueError, match="contradict"):
        factor(checkpoint({"prefill": {**both, "a": 8.0}}))


@pytest.mark.parametrize("target", [-0.1, 1.0, 1.5, math.nan, "0.5"])
def test_reported_Q02_a_target_that_is_none(target: object) -> None:
    content = checkpoint({"prefill": {"a": 7.93, "b": 8.61}}, target_sparsity={"prefill": target})
    with pytest.raises((ValueError, TypeError), match="target_sparsity"):
        factor(content)
    with pytest.raises((ValueError, TypeError), match="target_sparsity"):
        SkipSoftmaxConfig(target_sparsity=target)  # type: ignore[arg-type]


def test_reported_Q02_a_phase_without_a_fit() -> None:
    content = checkpoint({"prefill": {"a": 7.93, "b": 8.61}})
    assert SkipSoftmaxConfig.from_checkpoint(content).options("decode") == {}
    asked = checkpoint({"prefill": {"a": 7.93, "b": 8.61}}, target_sparsity={"decode": 0.5})
    with pytest.raises(ValueError, match="decode"):
        SkipSoftmaxConfig.from_checkpoint(asked).options("decode")


def test_reported_Q02_other_tiles_are_named() -> None:
    config = SkipSoftmaxConfig.from_checkpoint(checkpoint({"prefill": {"a": 7.93, "b": 8.61}}))
    with pytest.warns(UserWarning, match=r"128 keys.*64 keys"):
        config.check("prefill", Geometry.prefill(order="ascending"))


@pytest.mark.parametrize(
    ("name", "value"), [(n, x) for n in "ab" for x in (0.0, -1.0, math.nan, "1")]
)
def test_reported_Q02_coefficients_that_are_none(tmp_path: Path, name: str, value: object) -> None:
    content = checkpoint({"prefill": {"a": 7.93, "b": 8.61, name: value}})
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        SkipSoftmaxConfig.from_checkpoint(saved(tmp_path, content))


@pytest.mark.parametrize(
    "read",
    [
        SkipSoftmaxConfig.from_checkpoint,
        SkipSoftmaxConfig.from_vllm_omni,
    ],
)
def test_reported_Q02_a_file_cut_in_half_is_named(tmp_path: Path, read: Any) -> None:
    path = saved(tmp_path, checkpoint({"prefill": {"a": 7.93, "b": 8.61}}))
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"config\.json"):
        read(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\xff", "9" * 10_000])
def test_reported_Q02_a_malicious_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json is no whole JSON file") as error:
        SkipSoftmaxConfig.from_checkpoint(path)
    assert len(str(error.value)) < 1000


def test_reported_Q02_saved_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    content = checkpoint(
        {"prefill": {"a": 2822.6209952221557, "b": 4.388250623520793}},
        target_sparsity={"prefill": 0.1 + 0.2},
    )
    content["other"] = {"kept": [1, 2]}
    path = saved(tmp_path, content)
    config = SkipSoftmaxConfig.from_checkpoint(path)
    config.write_checkpoint(path)
    assert json.loads(path.read_text())["other"] == {"kept": [1, 2]}
    again = SkipSoftmaxConfig.from_checkpoint(path)
    assert again == config
    assert (again.coefficients["prefill"].a, again.coefficients["prefill"].b) == (
        2822.6209952221557,
        4.388250623520793,
    )  # type: ignore[index, union-attr]
    assert again.target_sparsity == {"prefill": 0.1 + 0.2}


# ---- D01 -----------------------------------------------------------------------------------------


GATE = 0.86
STEPS = [1 - i / 50 for i in range(50)]
KERNEL = prefill_variant(skip_softmax_threshold=0.1, collect_stats=True)


def dense_steps(published: list[dict[str, Any]], device: str = "cpu") -> list[bool]:
    """Whether each step is dense, by what a gated threshold holds."""
    with DenoiseProgress():
        record_denoise_step(0, **published[0])
        config = SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=GATE)
        live = config.options("prefill", batch_size=1, device=device)["skip_softmax_threshold"]
        found = []
        for i, step in enumerate(published):
            record_denoise_step(i, **step)
            found.append(live.clone())
    return [bool(x == 0) for x in found]


EXACTLY_7 = [True] * 7 + [False] * 43


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reported_D01_seven_dense_steps(dtype: torch.dtype, device: str) -> None:
    assert dense_steps([{"normalized_timestep": t} for t in STEPS]) == EXACTLY_7
    tensors = [torch.tensor(t, dtype=dtype, device=device) for t in STEPS]
    assert dense_steps([{"normalized_timestep": t} for t in tensors], device) == EXACTLY_7


def test_reported_D01_a_thousand_timesteps_are_declared() -> None:
    scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    for declared in ({"num_train_timesteps": 1000}, {"scheduler": scheduler}):
        assert dense_steps([{"timestep": 1000 * t, **declared} for t in STEPS]) == EXACTLY_7
    with DenoiseProgress():
        with pytest.raises(ValueError, match="timestep"):
            record_denoise_step(0, timestep=860.0)
        with pytest.raises(ValueError, match="the normalized timestep is 860"):
            record_denoise_step(0, normalized_timestep=860.0)


def test_reported_D01_rounded_timesteps_flip_at_most_one_step() -> None:
    rounded = [torch.tensor(t, dtype=torch.bfloat16) for t in STEPS]
    dense = dense_steps([{"normalized_timestep": t} for t in rounded])
    assert dense[:6] == [True] * 6
    assert dense[8:] == [False] * 42


def test_reported_D01_the_step_index_decides_nothing() -> None:
    with DenoiseProgress():
        record_denoise_step(0, normalized_timestep=0.5)  # a second expert starts here
        config = SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=GATE)
        live = config.options("prefill", batch_size=1, device="cpu")["skip_softmax_threshold"]
        assert live.tolist() == [0.5]
        record_denoise_step(49, normalized_timestep=0.9)
        assert live.tolist() == [0.0]


@pytest.mark.parametrize("gate", [-0.1, 1.1, math.nan])
def test_reported_D01_a_gate_outside_of_0_to_1_is_refused(gate: float) -> None:
    with pytest.raises(ValueError, match="disabled_until_timestep"):
        SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=gate)


def test_reported_D01_step_counts_are_refused() -> None:
    content = checkpoint({"prefill": {"a": 7.93, "b": 8.61}}, initial_disabled_steps=7)
    with pytest.raises(ValueError, match="initial_disabled_steps is 7"):
        SkipSoftmaxConfig.from_checkpoint(content)


@on_both(KERNEL)
def test_reported_D01_counters_follow_the_gate(device: str) -> None:
    request = twin_peak(1024, 4.0, 64)
    with DenoiseProgress():
        record_denoise_step(0, normalized_timestep=STEPS[6])
        config = SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=GATE)
        for step, skips in ((6, False), (7, True)):
            record_denoise_step(step, normalized_timestep=torch.tensor(STEPS[step], device=device))
            options = config.options(
                "prefill",
                batch_size=1,
                device=torch.device(device, 0) if device == "cuda" else device,
            )
            stats = prefill(
                [request], device, sm_scale=1.0, collect_stats=True, **options
            ).wrapper.stats
            assert bool(stats[..., 0].any()) == skips


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_reported_D01_a_cuda_timestep_is_read_inside_a_graph_without_waiting() -> None:
    """One graph, replayed with each step's timestep: what it decides is on the device alone."""
    now = torch.tensor(1.0, device="cuda")
    with DenoiseProgress():
        record_denoise_step(0, normalized_timestep=now)
        config = SkipSoftmaxConfig(threshold=0.5, disabled_until_timestep=GATE)
        live = config.options("prefill", batch_size=1, device=torch.device("cuda", 0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            record_denoise_step(1, normalized_timestep=now)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            record_denoise_step(2, normalized_timestep=now)
        found = []
        for t in STEPS:
            now.fill_(t)
            graph.replay()
            found.append(bool(live["skip_softmax_threshold"].item() == 0))
    assert found == EXACTLY_7

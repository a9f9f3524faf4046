"""The benchmark harness on a CPU: cases, data, timing, supervision, tables, figures."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import bars, machine, measure, report, result_file, rows, supervise
from benchmarks.cases import DecodeCase, PrefillCase, chunk, decode, prefill
from benchmarks.check import check_output
from benchmarks.contestant import NOT_ASKED, Contestant, Prepared, Unsupported
from benchmarks.data import PREFILL_TILE, THRESHOLD, make_data
from benchmarks.groups import DECODE_DENSE, GROUPS, HOST_CASES, HOST_DECODE, TINY
from benchmarks.peers import CONTESTANTS, cudnn, flash_attention, flashinfer
from benchmarks.peers import flashskip as ours
from benchmarks.peers.probe import skipped_share
from benchmarks.timing import Clock, Timing, interleave, speedup
from flashskip import reference
from flashskip.geometry import Geometry
from flashskip.variant import supported

ROOT = Path(__file__).resolve().parents[1]

CPU = torch.device("cpu")


def reference_result(case, data):
    """What the library computes on a case's data, and the share that it skips."""
    group_size = case.num_qo_heads // case.num_kv_heads
    if isinstance(case, PrefillCase):
        geometry = Geometry.prefill(group_size, causal=case.causal)
        k, v, qo_indptr, kv_indptr = data.k, data.v, data.qo_indptr, data.kv_indptr
    else:
        geometry = Geometry.decode(group_size)
        k, v, kv_indptr = reference.gather_pages(
            (data.k.to(data.q.dtype), data.v.to(data.q.dtype)),
            data.indptr, data.indices, data.last_page_len,
        )  # fmt: skip
        qo_indptr = torch.arange(case.batch_size + 1, dtype=torch.int32)
    result = reference.attention(
        data.q, k, v, qo_indptr=qo_indptr, kv_indptr=kv_indptr, geometry=geometry,
        thresholds=[THRESHOLD] * (len(kv_indptr) - 1), dtype=torch.float32, skip_map=False,
    )  # fmt: skip
    skipped, visited = result.counts.sum((0, 1)).tolist()
    return result.out, skipped / visited


DATA_CASES = [
    PrefillCase("causal", (1536,), (1536,), True, 2, 2, 64, 64, "float16"),
    PrefillCase("full", (200, 130), (1024, 1536), False, 2, 1, 64, 64, "float16"),
    PrefillCase("chunk", (128,), (2048,), True, 2, 1, 64, 64, "float16"),
    PrefillCase("packed", (16, 16), (4096, 4096), True, 6, 2, 64, 64, "float16"),
    DecodeCase("page 16", 2, 2048, 4, 2, 64, 16, "float16"),
    DecodeCase("page 48, last one half full", 2, 2040, 3, 1, 64, 48, "float16"),
    DecodeCase("fp8", 2, 2048, 4, 2, 64, 16, "float16", kv_dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("case", DATA_CASES, ids=lambda c: c.name)
def test_data_has_the_share_that_was_asked_for(case):
    for share in (0.0, 0.6):
        data = make_data(case, share, CPU)
        out, skipped = reference_result(case, data)
        assert skipped == pytest.approx(share, abs=0.05 if share else 0)
        check = check_output(case, data, out.half(), skips=True, paged=True)
        assert check["error"] < check["tolerance"] < 0.005


def test_uneven_heads_run_from_nothing_to_twice_the_share():
    case = decode(3, 4096, 64, head_dim=64, num_kv_heads=4, uneven=True)
    cold = make_data(case, 0.3, CPU).cold.float().mean(-1)
    assert (cold == cold[0]).all()
    assert cold[0].sort().values.tolist() == pytest.approx([0, 0.2, 0.4, 0.6], abs=0.01)


@pytest.mark.parametrize("case", TINY, ids=lambda c: c.name)
def test_check_refuses_a_dropped_hot_tile_and_nan(case):
    data = make_data(case, 0.5, CPU)
    good, _ = reference_result(case, data)
    wrong = good * 1.05
    assert check_output(case, data, wrong, skips=True, paged=True)["error"] > 0.03
    good[-1, -1, -1] = float("nan")
    assert check_output(case, data, good, skips=True, paged=True)["error"] == float("inf")


def test_data_is_the_same_for_the_same_seed():
    one, two = (make_data(TINY[2], 0.5, CPU) for _ in range(2))
    assert torch.equal(one.k, two.k)
    assert torch.equal(one.indices, two.indices)
    assert sorted(one.indices.tolist()) == list(range(one.k.shape[0]))


def test_pages_hold_what_ragged_keys_hold():
    case = prefill((130, 1, 96), True, num_qo_heads=2, num_kv_heads=2, page_size=16)
    data = make_data(case, 0.0, CPU)
    k, v, kv_indptr = reference.gather_pages(
        (data.pages.k, data.pages.v), data.pages.indptr, data.pages.indices,
        data.pages.last_page_len,
    )  # fmt: skip
    assert torch.equal(kv_indptr, data.kv_indptr)
    assert torch.equal(k, data.k)
    assert torch.equal(v, data.v)
    assert data.pages.indices.tolist() != sorted(data.pages.indices.tolist())


@pytest.mark.parametrize("group", GROUPS)
def test_cases_are_well_formed(group):
    cases = GROUPS[group]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.num_qo_heads % case.num_kv_heads == 0
        assert case.work > 0
        assert case.shares[0] == 0.0  # every case has its dense figure
        if isinstance(case, PrefillCase):
            assert len(case.qo_lens) == len(case.kv_lens)


def test_work_is_counted_as_the_field_does():
    case = next(c for c in GROUPS["first"] if c.name == "prefill-1x8192-causal")
    assert case.work == 4 * 32 * 128 * 8192**2 / 2
    case = next(c for c in GROUPS["first"] if c.name == "decode-64x8192-page64")
    assert case.work == 64 * 8192 * 8 * 128 * 2 * 2
    assert replace(case, kv_dtype="float8_e4m3fn").work == case.work / 2
    assert chunk(2, 10, num_qo_heads=1, num_kv_heads=1).visible_pairs == 9 + 9  # 9 and 10
    assert chunk(2, 10, 3, num_qo_heads=1, num_kv_heads=1).visible_pairs == 3 * (9 + 9)


@pytest.mark.parametrize("case", [*TINY[::2], PrefillCase("b2", (64,) * 2, (64,) * 2, True)])
def test_cudnn_adapter_computes_attention(case, monkeypatch):
    # The same call through the attention that torch has on a CPU: views and heads are right.
    monkeypatch.setattr(cudnn, "BACKEND", SDPBackend.MATH)
    data = make_data(case, 0.5, CPU)
    prepared = cudnn.prepare(case, data)
    out = prepared.to_rows(prepared.run())
    check = check_output(case, data, out, skips=False, paged=prepared.paged)
    assert check["error"] < check["tolerance"]


@pytest.mark.parametrize(
    "case",
    [
        prefill((192, 130), True, num_qo_heads=2, num_kv_heads=1),
        prefill(384, False, num_qo_heads=2, num_kv_heads=1),
        chunk(100, 700, num_qo_heads=2, num_kv_heads=1),
        chunk(16, 700, 2, num_qo_heads=2, num_kv_heads=1),
    ],
    ids=lambda case: case.name,
)
def test_probe_counts_skipped_tiles(case):
    data = make_data(case, 0.0, CPU)
    head_dim = data.v.shape[-1]
    dropped = 1  # of each request, where it has one

    def attend(v, dropped=dropped):
        """Add up the V that each row sees, but for one tile."""
        outs, q_at, k_at = [], 0, 0
        for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
            key = torch.arange(kv_len)
            last = torch.arange(qo_len) + kv_len - qo_len if case.causal else key[-1:]
            seen = (key <= last[:, None]).expand(qo_len, -1) & (key // PREFILL_TILE != dropped)
            outs.append(seen.float() @ v[k_at : k_at + kv_len, 0].float())
            q_at, k_at = q_at + qo_len, k_at + kv_len
        return torch.cat(outs)[:, None].expand(-1, case.num_qo_heads, head_dim)

    assert skipped_share(case, data, lambda v: attend(v, None), PREFILL_TILE) == 0
    expected = skipped = 0
    for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
        for block in range(0, qo_len, 64):
            last = min(block + 64, qo_len) - 1 + kv_len - qo_len if case.causal else kv_len - 1
            expected += last // PREFILL_TILE + 1
            skipped += last // PREFILL_TILE >= dropped
    assert skipped_share(case, data, attend, PREFILL_TILE) == pytest.approx(skipped / expected)


def test_peers_say_why_they_are_absent_and_refuse_what_is_not_theirs():
    prompt, step = TINY[0], TINY[2]
    for contestant in CONTESTANTS:
        if not contestant.ours and not torch.cuda.is_available():
            assert "GPU" in contestant.available()
    for prepare, case in (
        (ours.prepare_unpaged, prompt),
        (flash_attention.prepare_fa4, step),
        (flash_attention.prepare_fa3, prompt),
        (flashinfer.prepare_ragged.__wrapped__, step),
        (flashinfer.prepare_paged.__wrapped__, prompt),
        (flashinfer.prepare_fmha_v2.__wrapped__, step),
        (flashinfer.prepare_xqa.__wrapped__, prompt),
    ):
        with pytest.raises(Unsupported, match=NOT_ASKED):
            prepare(case, None)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_of_a_group_are_known_without_a_gpu(group):
    found = ours.variants(GROUPS[group])
    assert len(set(found)) == len(found) >= 3
    assert all(map(supported, found))
    ops = {case.op for case in GROUPS[group]}
    assert {(v.op, v.skip, v.stats) for v in found} >= {
        (op, *kind) for op in ops for kind in (("dense", False), ("threshold", True))
    }


def test_a_machine_without_a_gpu_gets_one_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["-m", "benchmarks", "run", "--group", "first", "--out", tmp_path / "first.json"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_commit_can_be_told_where_there_is_no_git():
    assert machine.describe(CPU, "abc")["commit"] == "abc"
    assert len(machine.describe(CPU)["sources_sha256"]) == 64


def test_cudnn_on_a_paged_prefill_is_no_paged_peer():
    case = prefill(64, True, page_size=16, num_qo_heads=2, num_kv_heads=2)
    assert not cudnn.prepare(case, make_data(case, 0.0, CPU)).paged
    assert cudnn.prepare(replace(case, page_size=0), make_data(case, 0.0, CPU)).paged


def test_cudnn_refuses_what_it_would_compute_wrongly():
    for qo_lens, kv_lens in (((64, 32), (64, 32)), ((32,), (64,))):
        with pytest.raises(Unsupported):
            cudnn.prepare(PrefillCase("", qo_lens, kv_lens, True), None)


def test_ratio_is_taken_within_rounds():
    slow_then_fast = Timing([4.0, 2.0, 1.0], 1)
    assert speedup(slow_then_fast, Timing([2.0, 1.0, 0.5], 1)) == 2.0
    assert slow_then_fast.quartiles_ms == (1.5, 3.0)


def test_each_round_calls_all_in_an_order_of_its_own():
    order, names = [], [*"abcdefghij"]  # so many that two orders are hardly ever the same
    calls = {name: lambda name=name: order.append(name) for name in names}
    timings = interleave(calls, Clock(CPU))
    assert order[:10] == names  # an estimate of each
    rounds = [order[i : i + 10] for i in range(10, len(order), 10)]
    assert len(rounds) == len(timings["a"].rounds_ms) > 1
    assert all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) == len(rounds)


def test_the_documented_command_runs_without_a_gpu(tmp_path):
    path = tmp_path / "tiny.json"
    command = ["-m", "benchmarks", "run", "--group", "tiny", "--device", "cpu", "--out", path]
    environment = {**os.environ, "FLASHSKIP_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, *command, "--time-budget", "5"], cwd=ROOT, env=environment, check=True
    )
    results = json.loads(path.read_text())
    assert not results["died"]
    assert "kernels" in results["done"]


def contestants(case, data):
    return reference_result(case, data)[0].to(data.q.dtype)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A tiny run with a right, a wrong and a failing contestant."""
    monkeypatch.setitem(GROUPS, "tiny", (replace(TINY[2], batch_size=1, kv_len=128),))
    monkeypatch.setitem(HOST_CASES, "tiny", ())

    def right(case, data):
        return Prepared(lambda: contestants(case, data), skipped_share=lambda: 0.5)

    def wrong(case, data):
        return Prepared(lambda: torch.zeros_like(data.q))

    def failing(case, data):
        raise RuntimeError("no such kernel")

    def elsewhere(case, data):
        raise Unsupported(NOT_ASKED)

    cast = (
        Contestant("right", right, skips=True, ours=True),
        Contestant("also right", right, ours=True),
        Contestant("wrong", wrong),
        Contestant("failing", failing),
        Contestant("absent", right, lambda: "not installed"),
        Contestant("elsewhere", elsewhere),
    )
    path = tmp_path / "tiny.json"
    measure.Measurement(path, "tiny", CPU, contestants=cast).run(100.0)
    return path, cast


def test_only_right_contestants_get_a_number(measured):
    results = json.loads(measured[0].read_text())
    assert results["machine"]["device"] == "cpu"
    entries = results["records"][1]["contestants"]
    assert [n for n, e in entries.items() if "rounds_ms" in e] == ["right", "also right"]
    assert entries["right"]["skipped"] == 0.5
    assert "WrongResult" in entries["wrong"]["failed"]
    assert "no such kernel" in entries["failing"]["failed"]
    assert results["absent"] == {"absent": "not installed"}
    assert not {"absent", "elsewhere"} & set(entries)
    assert "doing" not in results


def test_a_run_resumes_and_respects_its_budget(measured):
    path, cast = measured
    results = json.loads(path.read_text())
    name = TINY[2].name
    results["done"].remove(f"{name} 0.5")
    results["records"].pop()
    results["died"].append({"step": f"{name} 0.0", "contestant": "right", "reason": "test"})
    result_file.save(path, results)
    measure.Measurement(path, "tiny", CPU, contestants=cast).run(-1.0)
    results = json.loads(path.read_text())
    assert results["not_run"] == [f"{name} 0.5"]
    measure.Measurement(path, "tiny", CPU, contestants=cast).run(100.0)
    results = json.loads(path.read_text())
    assert len(results["records"]) == 2
    entry = results["records"][1]["contestants"]["right"]
    assert entry["unsupported"] == f"left out: died in {name} 0.0 (test)"


WORKER = """
import json, os, sys, time
path = sys.argv[1]
results = json.load(open(path)) if os.path.exists(path) else {"done": [], "died": []}
for step in ("crash", "hang", "good"):
    if step in results["done"]:
        continue
    results["doing"] = {"step": step, "contestant": "x"}
    json.dump(results, open(path, "w"))
    if step == "crash":
        os._exit(7)
    if step == "hang":
        time.sleep(60)
    results["done"].append(step)
    del results["doing"]
    json.dump(results, open(path, "w"))
"""


def test_supervision_goes_on_after_a_crash_and_a_hang(tmp_path):
    path = tmp_path / "results.json"
    deaths = supervise.run([sys.executable, "-c", WORKER, str(path)], path, 30.0, quiet=1.0)
    results = json.loads(path.read_text())
    assert deaths == 2
    assert results["done"] == ["crash", "hang", "good"]
    assert [d["reason"] for d in results["died"]] == ["exit status 7", "no sign of life"]


def made_up(share, ours_ms, name="made-up"):
    """A record with invented times, for the tables alone."""

    def entry(ms, **more):
        return {"ours": True, "skips": False, "rounds_ms": [ms, ms, ms], "reps": 3, **more}

    return {
        "op": "decode", "case": name, "share": share, "work": 4e9,
        "contestants": {
            "peer": entry(1.0, ours=False),
            "unpaged": entry(0.8, ours=False, unpaged=True),
            "dense": entry(1.0),
            "skip": entry(ours_ms, skips=True, skipped=share),
            "gone": {"ours": False, "skips": False, "unsupported": "made up"},
        },
    }  # fmt: skip


@pytest.fixture
def made_up_results(tmp_path):
    machine = dict.fromkeys(
        ("driver", "torch", "cudnn", "cuda-bindings", "nvrtc", "sources_sha256", "commit"), "?"
    )
    results = {
        "group": "made-up", "date": "2000-01-01",
        "machine": {"device": "cuda", "gpu": "none", **machine},
        "ceilings": {"gemm_tflops": 1.0, "copy_gbps": 1.0, "read_gbps": 5000.0},
        "records": [made_up(0.0, 1.0), made_up(0.5, 0.8), made_up(0.75, 0.64)],
        "host": {"made-up": {"dense": {"run_us": 9.0, "plan_us": 20.0}, "peer": {"run_us": 30.0}}},
        "kernels": {"some_symbol": {"first_plan_s": 1.25}}, "died": [], "not_run": ["later"],
    }  # fmt: skip
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(results))
    (folder / "cpu.json").write_text(json.dumps(results | {"machine": {"device": "cpu"}}))
    (folder / "gpu_tests.json").write_text("{}")
    return rows.load_results(folder)


def test_tables(made_up_results, tmp_path):
    assert [r["file"] for r in made_up_results] == ["a.json"]
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- tables: begin -->\nstale\n<!-- tables: end -->\nbelow\n")
    report.write_tables(made_up_results, page)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "stale" not in text
    assert "| made-up | 4000 | 5000 | 4000 | 4000 | 1.00 | 0.80 | 1.00 | 80 |" in text
    assert (
        "| made-up | 50.0 % | 1.000 | 0.800 (0.800 to 0.800) | 1.25 | 1.33 | 0.938 | 1.25 | 75 |"
        in text
    )
    assert "| made-up | peer | – | 30.0 |" in text
    assert "| `some_symbol` | 1.25 | – |" in text
    assert "gone: made up" in text
    assert "](figures/dense_made-up.svg)" in text
    assert "later: not run" in text
    report.write_tables(made_up_results, page)
    assert page.read_text() == text


def test_bars_are_judged(made_up_results):
    (results,) = made_up_results
    assert bars.bars(results) == []
    case = DECODE_DENSE[0]
    host = {
        "flashskip dense": {"run_us": 9.0, "plan_us": 18.0},
        "flashinfer x": {"run_us": 30.0, "plan_us": 60.0},
    }
    shares = zip(case.shares, (1.0, 0.75, 0.7, 0.4), strict=True)
    results |= {
        "group": "decode",
        "records": [made_up(share, ms, case.name) for share, ms in shares],
        "host": {HOST_DECODE.name: host},
    }
    found = {(b.what, b.where): b for b in bars.bars(results)}
    assert len(found) == len(bars.bars(results))

    def judge(what, where=case.name):
        bar = found[what, where]
        return bar.figure, bar.verdict

    assert judge("dense over best paged peer") == (1.0, "reached")
    assert judge("dense over cuDNN on unpaged K and V") == (0.8, "**missed**")
    assert judge("dense over best paged peer", DECODE_DENSE[1].name) == (None, "not measured")
    assert judge("gain over 2/(2 − s)", f"{case.name}, 50 %")[0] == pytest.approx(1.0)
    assert judge("gain over 2/(2 − s)", f"{case.name}, 75 %")[1] == "**missed**"
    assert judge("CPU time of plan and run, µs", HOST_DECODE.name) == (27.0, "**missed**")
    assert judge("CPU time of plan and run over FlashInfer's", HOST_DECODE.name) == (
        0.3,
        "**missed**",
    )
    text = report.bar_lines(results)
    assert "missed" in text.splitlines()[1]
    assert (
        "| dense over best paged peer | decode-128x16384-page64-h64/8 | 1.000 | ≥ 1 | reached |"
        in (report.section(results))
    )


def test_geometric_mean_needs_every_case(made_up_results):
    (results,) = made_up_results
    cases = bars.groups.PREFILL_DENSE

    def record(case, ms):
        return made_up(0.0, 1.0, case.name) | {
            "op": "prefill",
            "contestants": {
                "peer": {"ours": False, "skips": False, "rounds_ms": [1.0] * 3, "reps": 1},
                "dense": {"ours": True, "skips": False, "rounds_ms": [ms] * 3, "reps": 1},
            },
        }

    results |= {"group": "prefill", "records": [record(c, 0.5) for c in cases[:-1]]}
    mean = next(b for b in bars.bars(results) if "mean" in b.what)
    assert mean.figure is None
    results["records"].append(record(cases[-1], 2.0))
    mean = next(b for b in bars.bars(results) if "mean" in b.what)
    assert mean.figure == pytest.approx(math.prod([2.0] * 7 + [0.5]) ** (1 / 8))


def test_figures_are_reproducible(made_up_results, tmp_path):
    plot = pytest.importorskip("benchmarks.plot", exc_type=ImportError)
    paths = plot.write_figures(made_up_results, tmp_path / "one")
    again = plot.write_figures(made_up_results, tmp_path / "two")
    assert [path.name for path in paths] == ["dense_made-up.svg", "speedup_made-up.svg"]
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    rates = rows.dense_rates(made_up_results[0], "decode")
    assert rates == {"made-up": {"peer": 4000, "unpaged": 5000, "dense": 4000}}
    assert rows.curves(made_up_results[0], "decode") == {
        "made-up": [(0.0, 1.0), (0.5, 1.25), (0.75, 1.5625)]
    }

"""Two commits' kernels side by side: all but the launches, which need a GPU."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import machine, programs, versus
from benchmarks.cases import prefill
from benchmarks.counters import Target
from benchmarks.data import THRESHOLD, make_data
from benchmarks.groups import CASES
from benchmarks.peers.flashskip import planned, variant_of
from benchmarks.timing import Clock
from benchmarks.versus import TARGETS, Launch
from flashskip import _kernels
from flashskip.variant import supported

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
DENSE, SKIP = (Launch(Target("prefill-1x16384-full", 0.0, skips)) for skips in (False, True))
DECODE = Launch(Target("decode-2x512-page16-h4/2-d64", 0.5, True))
PREFILL = Launch(Target("prefill-mix2-full-h4/2-d64", 0.5, True))


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """The kernels of this checkout, as a file would give them back."""
    return json.loads(json.dumps(versus.render(ROOT, (DENSE, SKIP, DECODE), "abc")))


@pytest.fixture
def other(rendered: dict[str, Any]) -> dict[str, Any]:
    """The same, to be changed."""
    return copy.deepcopy(rendered)


# ---- targets


def test_targets_are_cases_of_supported_kernels() -> None:
    assert {launch.target.case for launch in TARGETS} <= CASES.keys()
    assert all(supported(launch.variant()) for launch in TARGETS)
    assert len({str(launch) for launch in TARGETS}) == len(TARGETS)
    skips = {launch.variant().skip for launch in TARGETS if launch.target.skips}
    assert skips == {"threshold"}


@pytest.mark.parametrize("launch", [DECODE, PREFILL], ids=str)
def test_the_kernel_does_not_depend_on_lengths(launch: Launch) -> None:
    case = CASES[launch.target.case]
    wrapper, _ = planned(case, make_data(case, 0.5, CPU), **launch.options)
    assert wrapper.variant == launch.variant()
    assert launch.variant(collect_stats=True) == variant_of(
        case, skip_softmax_threshold=THRESHOLD, collect_stats=True
    )


def test_every_second_head_of_a_lopsided_batch_skips_nothing() -> None:
    case = prefill(1024, False, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64)
    options = {"skip_softmax_threshold": THRESHOLD, "collect_stats": True}
    shares = []
    for change in (lambda data: None, versus.make_lopsided):
        data = make_data(case, 0.75, CPU)
        change(data)
        wrapper, prepared = planned(case, data, **options)
        prepared.run()
        skipped, visited = wrapper.stats[0].unbind(-1)
        shares.append((skipped / visited).tolist())
    assert shares[0] == pytest.approx([0.75] * 4, abs=0.05)
    assert shares[1] == [shares[0][0], 0.0, shares[0][2], 0.0]


# ---- kernels of a checkout


def test_a_rendering_is_the_kernel(rendered: dict[str, Any]) -> None:
    assert rendered["commit"] == "abc"
    assert len(rendered["kernels"]) == 3
    for launch in (DENSE, SKIP, DECODE):
        v = launch.variant()
        found = rendered["kernels"][v.symbol]
        assert programs.program_of(found) == _kernels.program_for(v)
        assert found["params"] == _kernels.params_for(v).c_struct
        assert found["grid"] == 132
        assert found["workspace_bytes"] == _kernels.workspace_bytes(v, 132)
    versus.check((DENSE, SKIP, DECODE), rendered)


def test_another_checkout_renders_its_own_sources(tmp_path: Path) -> None:
    for folder in ("flashskip", "templates", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for header in (tmp_path / "csrc").rglob("*.cuh"):
        header.write_text(f"// elsewhere\n{header.read_text()}")
    kernels = tmp_path / "flashskip" / "_kernels.py"  # as before there were pairs
    kernels.write_text(kernels.read_text().replace("def grid_for", "def _grid_for"))
    symbol = DENSE.variant().symbol
    theirs = versus.render(tmp_path, [DENSE], "def")["kernels"][symbol]
    ours = programs.describe(symbol)
    assert all(
        text.startswith("// elsewhere") for _, text in theirs["program"]["source"]["headers"]
    )
    assert programs.program_of(theirs).content != programs.program_of(ours).content
    assert theirs["grid"] == 132
    assert programs.misfit(theirs, ours) == ""


def test_a_folder_without_flashskip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not render: there is no flashskip"):
        versus.render(tmp_path, [DENSE], "def")


def test_a_variant_that_the_checkout_lacks_is_named() -> None:
    with pytest.raises(RuntimeError, match="'flashskip_future' is unknown"):
        programs.of_checkout(ROOT, ["flashskip_future"])


def test_a_checkout_without_git_has_no_commit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no git; pass --commit"):
        versus.render(tmp_path, [DENSE], "")


def test_the_commit_is_that_of_the_folder_itself(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "exported").mkdir()
    assert len(machine.commit_of(tmp_path)) == 40
    assert machine.commit_of(tmp_path / "exported") == "unknown"


# ---- what must not be launched


def refusal(other: dict[str, Any], launch: Launch) -> str:
    with pytest.raises(ValueError, match=str(launch)) as error:
        versus.check([launch], other)
    return str(error.value)


def test_other_parameters_are_refused(other: dict[str, Any]) -> None:
    kernel = other["kernels"][SKIP.variant().symbol]
    kernel["params"] = kernel["params"].replace("  float allowance;", "  double allowance;")
    found = refusal(other, SKIP)
    assert "not those that the plan passes: - double allowance; + float allowance;" in found


def test_more_memory_than_is_reserved_is_refused(other: dict[str, Any]) -> None:
    kernel = other["kernels"][DENSE.variant().symbol]
    kernel["workspace_bytes"] -= 4  # less is none of its concern
    versus.check([DENSE], other)
    kernel["merge_counters"] += 1
    assert "it needs merge_counters=793; the plan reserves 792" in refusal(other, DENSE)


def test_another_grid_is_refused_where_the_plan_divided_it(other: dict[str, Any]) -> None:
    for kernel in other["kernels"].values():
        kernel["grid"] = 66
    versus.check([DENSE], other)
    assert "its grid is 66; the plan's parameters are for 132" in refusal(other, DECODE)


def test_a_way_of_launching_that_is_not_known_is_refused(other: dict[str, Any]) -> None:
    other["kernels"][DENSE.variant().symbol]["program"]["clusters"] = 2
    assert "fields ['clusters'], which these sources do not know" in refusal(other, DENSE)


def test_a_kernel_that_was_not_rendered_is_named(other: dict[str, Any]) -> None:
    del other["kernels"][DENSE.variant().symbol]
    assert f"no {DENSE.variant().symbol}" in refusal(other, DENSE)


# ---- a comparison


def test_both_decodes_are_timed_in_the_same_rounds() -> None:
    entry = versus.compare(DECODE, None, 0, Clock(CPU))
    assert entry["target"] == "decode-2x512-page16-h4/2-d64@0.5:skip"
    assert entry["same_bits"]
    assert entry["skipped"] == pytest.approx(0.5, abs=0.05)
    assert entry["present"]["ms"] > 0
    assert entry["other"]["ms"] > 0
    assert "cycles" not in entry


def test_each_call_launches_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launch that writes who was launched and a turn whose time tells it."""
    case = CASES[PREFILL.target.case]
    wrapper, prepared = planned(case, make_data(case, 0.5, CPU), **PREFILL.options)
    plan, out = wrapper._planned(), torch.zeros(2, 1, 4, dtype=torch.bfloat16)
    numbers = {("ours", 132): 1.0, ("theirs", 66): 2.0}
    plan.kernel, plan.grid = "ours", 132
    prepared.run = lambda: out.fill_(numbers[plan.kernel, plan.grid])
    prepared.skipped_share = lambda: 0.25

    def turn(call: Any, settling: float, seconds: float) -> dict[str, float]:
        assert 0 < settling < seconds
        return {"ms": call().max().item(), "mhz": 1600.0}

    monkeypatch.setattr(versus, "planned", lambda *_, **__: (wrapper, prepared))
    monkeypatch.setattr(versus.power, "turn", turn)
    entry = versus.compare(PREFILL, "theirs", 66, Clock(CPU))
    assert entry == {
        "target": "prefill-mix2-full-h4/2-d64@0.5:skip",
        "same_bits": False,
        "difference": 0.5,
        "skipped": 0.25,
        "present": {"ms": 1.0, "mhz": 1600.0},
        "other": {"ms": 2.0, "mhz": 1600.0},
        "time": 0.5,
        "cycles": 0.5,
    }


def test_a_lopsided_launch_skips_half_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus.power, "turn", lambda *_: {"ms": 1.0})
    launches = PREFILL, PREFILL._replace(lopsided=True)
    even, lopsided = (versus.compare(launch, None, 0, Clock(CPU)) for launch in launches)
    assert lopsided["target"] == f"{even['target']}-lopsided"
    assert lopsided["skipped"] == pytest.approx(even["skipped"] / 2, abs=0.01) != 0


def test_another_kernel_than_was_rendered_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[DECODE.target.case]
    dense = planned(case, make_data(case, 0.5, CPU))
    monkeypatch.setattr(versus, "planned", lambda *_, **__: dense)
    with pytest.raises(RuntimeError, match=r"dense_sm90a was planned, not .*threshold"):
        versus.compare(DECODE, None, 0, Clock(CPU))


def test_bits_are_compared_and_rows_that_differ_by_their_norms() -> None:
    ours = torch.ones(3, 2, 4, dtype=torch.bfloat16)
    ours[0] = 0.0
    assert versus.difference(ours, ours.clone()) == {"same_bits": True}
    theirs = ours.clone()
    theirs[0, 0, 0] = -0.0
    assert versus.difference(ours, theirs) == {"same_bits": False, "difference": 0.0}
    theirs[2, 1] *= 8
    theirs[1, 0, 2] = 3.0  # by 2, of a row of norm sqrt(12)
    found = versus.difference(ours, theirs)
    assert found == {"same_bits": False, "difference": pytest.approx(7 / 8)}
    theirs[2, 1, 3] = float("nan")
    with pytest.raises(RuntimeError, match="the other kernel left NaN"):
        versus.difference(ours, theirs)


def test_ratios_are_taken_within_rounds() -> None:
    """The medians' ratio would be 2 / 2; the rounds' are 1/2, 2/4 and 3/1."""
    ours = [{"ms": ms, "mhz": 1500.0, "watts": 690.0} for ms in (1.0, 2.0, 3.0)]
    theirs = [{"ms": ms, "mhz": mhz, "watts": 680.0} for ms, mhz in ((2, 1500), (4, 3000), (1, 1))]
    found = versus.summary({"present": ours, "other": theirs})
    assert found["time"] == 0.5
    assert found["cycles"] == 0.5
    assert found["present"] == {"ms": 2.0, "mhz": 1500.0, "watts": 690.0}
    assert found["other"] == {"ms": 2.0, "mhz": 1500.0, "watts": 680.0}
    theirs[0]["mhz"] = 3000.0
    assert versus.summary({"present": ours, "other": theirs})["cycles"] == 0.25


# ---- the table, and the command line

RESULT = {
    "versus": [
        {
            **{"target": "a", "same_bits": True, "skipped": 0.746, "time": 0.9814, "cycles": 1.0},
            "present": {"ms": 1.0, "mhz": 1605.0},
            "other": {"ms": 1.1, "mhz": 1590.0},
        },
        {
            **{"target": "b", "same_bits": False, "difference": 0.00123, "time": 1.02},
            "present": {"ms": 1.0},
            "other": {"ms": 1.1},
        },
    ]
}
ROWS = [
    "| a | 0.981 | 1.000 | 1605, 1590 | 74.6% | same |",
    "| b | 1.020 | – | – | – | differ by 1.2e-03 |",
]


def test_the_table_has_a_row_for_each_launch() -> None:
    assert versus.table(RESULT).splitlines()[2:] == ROWS


def call_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["versus", *map(str, arguments)])
    versus.main()


def test_the_table_goes_into_a_page_that_has_a_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, results = tmp_path / "page.md", tmp_path / "versus.json"
    results.write_text(json.dumps(RESULT))
    monkeypatch.setattr(versus, "PAGE", page)
    page.write_text("no place\n")
    call_main(monkeypatch, "table", "--results", results)
    assert page.read_text() == "no place\n"
    page.write_text("<!-- versus: begin -->\nold\n<!-- versus: end -->\n")
    call_main(monkeypatch, "table", "--results", results)
    table = versus.table(RESULT)
    assert page.read_text() == f"<!-- versus: begin -->\n{table}\n<!-- versus: end -->\n"
    assert capsys.readouterr().out == f"{table}\n" * 2


def test_render_writes_a_file_for_the_named_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "other.json"
    only = ("--only", "1x8192-full", "--commit", "abc")
    call_main(monkeypatch, "render", "--sources", ROOT, "--out", out, *only)
    other = json.loads(out.read_text())
    (launch,) = (launch for launch in TARGETS if "1x8192-full" in str(launch))
    assert list(other["kernels"]) == [launch.variant().symbol]
    assert other["commit"] == "abc"


def test_no_target_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call_main(monkeypatch, "run", "--other", "x", "--only", "1x8193")
    assert "no target holds this text" in capsys.readouterr().err


def test_a_run_builds_all_and_saves_after_each_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, Any]
) -> None:
    """On a machine whose GPU, compiler and kernels are made up."""
    path, built, saved = tmp_path / "out.json", [], []
    for kernel in other["kernels"].values():
        kernel["program"]["source"]["text"] += "// before"

    def build(wanted: list[Any], directory: Path, *, jobs: int) -> Any:
        built.extend(wanted)
        return type("Outcome", (), {"failed": ()})

    def compare(launch: Launch, kernel: Any, grid: int, clock: Clock) -> dict[str, Any]:
        assert kernel.program.source.text.endswith("// before")
        assert kernel.program.symbol == launch.variant().symbol
        assert grid == 132
        saved.append(json.loads(path.read_text())["versus"] if path.exists() else [])
        return {**RESULT["versus"][0], "target": str(launch)}

    class Loaded:
        def __init__(self, program: Any, cache: Any) -> None:
            self.program = program

        def prepare(self, device: int) -> None: ...

    monkeypatch.setattr(versus, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(versus, "build", build)
    monkeypatch.setattr(versus, "load", Loaded)
    monkeypatch.setattr(versus, "compare", compare)
    monkeypatch.setattr(versus.machine, "describe", lambda device, commit: {"commit": commit})
    monkeypatch.setattr(versus.torch.cuda, "empty_cache", lambda: None)
    versus.run(path, other, [DENSE, SKIP], "now")
    results = json.loads(path.read_text())
    assert results["machine"] == {"commit": "now", "other": "abc"}
    assert [entry["target"] for entry in results["versus"]] == [str(DENSE), str(SKIP)]
    assert [len(entries) for entries in saved] == [0, 1]
    counting = SKIP.variant(collect_stats=True)
    symbols = [DENSE.variant().symbol, SKIP.variant().symbol] * 2 + [counting.symbol]
    assert sorted(program.symbol for program in built) == sorted(symbols)


def test_a_gpu_of_another_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(versus, "multiprocessors", lambda device: 114)
    monkeypatch.setattr(versus.torch.cuda, "get_device_name", lambda device: "H100 PCIe")
    with pytest.raises(ValueError, match=r"H100 PCIe has 114 multiprocessors; .* are for 132"):
        versus.run(tmp_path / "out.json", other, [DENSE], "")

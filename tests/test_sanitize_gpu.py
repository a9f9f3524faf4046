"""Both kernels under compute-sanitizer, and how its reports are read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prefill_gpu
import pytest
import sanitize_target
import torch
from sanitizer_report import (
    CSRC,
    DECODE_TEMPLATES,
    HANDED_ON,
    Report,
    is_handed_on,
    is_the_mailbox,
    mailbox,
    parse,
)

from flashskip import _kernels
from flashskip._jit.build import build
from flashskip.variant import DOMAINS, Variant, every, supported

ROOT = Path(__file__).resolve().parents[1]
FOUND = 9  # exit code of the tool when it found anything
SECONDS = 150  # for one run of the tool: it takes 15 to 45
OPTIONS = {
    "memcheck": ("--padding", "256"),  # so that no tensor ends where the next one begins
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
}


@pytest.fixture(scope="module")
def sanitizer() -> str:
    found = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is missing: install the CUDA toolkit")
    return found


@pytest.fixture(scope="module")
def runs(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Every run of the tool, all started at once: each keeps one core busy, and little of the GPU.

    Kernels that carry line information have a cache of their own, and are built first.
    """
    kernels = tmp_path_factory.mktemp("kernels")
    build(sanitize_target.programs(), kernels, jobs=os.cpu_count() or 1)
    quiet = {"memcheck": ("--report-api-errors", "no")}  # the last run shows them
    started = {
        f"{op} {tool}": start(sanitizer, kernels, op, tool, *quiet.get(tool, ()))
        for op in ("prefill", "decode")
        for tool in OPTIONS
    }
    started["api errors"] = start(sanitizer, kernels, "prefill", "memcheck")
    yield started
    for run in started.values():
        run.kill()


@dataclass
class Run:
    """The tool at work on the target of `op`."""

    op: str
    command: list[str]
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End the tool and what it watches."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def report(self) -> tuple[Report, str]:
        """Wait for it and read the report; the target itself must pass."""
        try:
            out, errors = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            out, errors = self.process.communicate()
            pytest.fail(f"{self.command}\nnot done in {SECONDS} s\n{excerpt(out + errors)}")
        said = f"{self.command}\nexit code {self.process.returncode}\n{excerpt(out + errors)}"
        assert self.process.returncode in (0, FOUND), said
        launched = len(getattr(sanitize_target, self.op.upper()))
        assert f"launched {launched} kernels" in out, said
        report = parse(out)
        assert not report.faults, f"{report.faults}\n{said}"
        return report, out


def start(sanitizer: str, kernels: Path, op: str, tool: str, *options: str) -> Run:
    """Run the target of `op` under a tool."""
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "0",
        "--kernel-name", "kns=flashskip_", "--target-processes", "application-only",
        *OPTIONS[tool], *options,
        sys.executable, str(Path(sanitize_target.__file__)), op,
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
        "FLASHSKIP_CACHE_DIR": str(kernels),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each tensor is an allocation that the tool knows
    }
    env.pop("FLASHSKIP_DISABLE_JIT", None)
    process = subprocess.Popen(
        command,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return Run(op, command, process)


def excerpt(text: str, lines: int = 60) -> str:
    """The start and the end of a long text."""
    every = text.splitlines()
    if len(every) <= 2 * lines:
        return text
    return "\n".join([*every[:lines], f"... {len(every) - 2 * lines} lines ...", *every[-lines:]])


def excused(op: str, tool: str, finding: str) -> bool:
    """Whether a finding is an access that is meant to be as it is."""
    if tool != "racecheck":
        return False
    return is_the_mailbox(finding) if op == "prefill" else is_handed_on(finding, source_of)


def source_of(symbol: str) -> str:
    """The text that a kernel is compiled from."""
    return _kernels.program_for(Variant.from_symbol(symbol)).source.text


@pytest.mark.gpu_sanitize
@pytest.mark.parametrize("tool", OPTIONS)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_kernels_are_clean(
    op: str, tool: str, sanitizer: str, runs: dict[str, Run], receipt_notes: dict[str, Any]
) -> None:
    report, _ = runs[f"{op} {tool}"].report()
    wrong = [f for f in report.findings if not excused(op, tool, f)]
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    receipt_notes["sanitizer"] = version.strip().splitlines()[-1] if version.strip() else "unknown"
    receipt_notes.setdefault("runs", {})[f"{op} {tool}"] = {
        "launches": len(getattr(sanitize_target, op.upper())),
        "findings": len(wrong),
        "deliberate": len(report.findings) - len(wrong),
    }
    assert not wrong, f"{len(wrong)} findings of {tool}:\n" + excerpt("\n\n".join(wrong))


@pytest.mark.gpu_sanitize
def test_errors_of_api_calls_are_shown(
    runs: dict[str, Run], receipt_notes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """For information: an error that a call returned to its caller is no wrong access."""
    report, _ = runs["api errors"].report()
    receipt_notes["api_errors"] = dict(report.api_errors)
    with capsys.disabled():
        print("\nAPI calls that returned an error:", dict(report.api_errors) or "none")
    assert not report.findings


# ---- reading reports -----------------------------------------------------------------------------

LAUNCHED = f"launched {len(sanitize_target.PREFILL)} kernels"
CLEAN = f"========= COMPUTE-SANITIZER\n{LAUNCHED}\n========= ERROR SUMMARY: 0 errors\n"

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API \
call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: prepare in kernel.py:131 [0x1234] in libcuda.so.1
=========
some words of the target ========= no line of a report
========= Invalid __global__ read of size 4 bytes
=========     at ld_global(unsigned long)+0x70 in global.cuh:8
=========         Device Frame: flashskip_decode_bf16+0x70 in flashskip_decode_bf16.cu:90
=========     by thread (255,0,0) in block (3,0,0)
=========     Access at 0x74b834000ffc is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x74b834000000 of size 4092 bytes
=========
========= ERROR SUMMARY: 2 errors
"""

SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at flashskip_decode_bf16+0xa0 in warpgroup.cuh:33
=========     by thread (19,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def race(*places: str) -> str:
    """A report of one race between accesses such as ``"Write vote.cuh:37"``."""
    accesses = [
        f"{kind} access at vote<(int)2>(unsigned int, unsigned int)+0x1f30 in {where}"
        for kind, where in (place.split() for place in places)
    ]
    head, *rest = accesses
    lines = [f"========= Error: Race reported between {head}"]
    lines += [f"=========     and {access} [96 hazards]" for access in rest]
    summary = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    return "\n".join(["========= COMPUTE-SANITIZER", *lines, "=========", summary, ""])


def test_a_clean_report() -> None:
    report = parse(CLEAN)
    assert report == Report((), Counter(), 0, True)
    assert not report.faults


def test_errors_of_kernels_and_of_api_calls_are_apart() -> None:
    report = parse(MEMCHECK)
    assert not report.faults
    assert report.api_errors == {"cuGetProcAddress_v2: CUDA_ERROR_NOT_FOUND": 1}
    (finding,) = report.findings
    assert finding.startswith("========= Invalid __global__ read")
    assert finding.endswith("of size 4092 bytes")
    assert not is_the_mailbox(finding)
    (finding,) = parse(SYNCCHECK).findings
    assert "warpgroup.cuh:33" in finding


@pytest.mark.parametrize(
    "text",
    [
        "",
        LAUNCHED,
        "========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error: something\n",
        CLEAN.replace("0 errors", "3 errors"),
        MEMCHECK.replace("SUMMARY: 2", "SUMMARY: 257")
        + "========= ERROR SUMMARY: 255 errors were not printed. Use --print-limit option\n",
        SYNCCHECK.replace("Barrier error", "Another error").replace("1 error", "0 errors"),
    ],
)
def test_a_report_that_is_not_understood_is_no_verdict(text: str) -> None:
    assert parse(text).faults


def test_only_the_mailbox_is_excused() -> None:
    written, read = ({f"{name}:{line}" for name, line in mailbox()[k]} for k in ("Write", "Read"))
    assert len(written) == len(read) == 2
    for w in written:
        for r in read:
            for places in ((f"Write {w}", f"Read {r}"), (f"Read {r}", f"Write {w}")):
                report = parse(race(*places))
                assert not report.faults
                assert is_the_mailbox(report.findings[0])
                assert excused("prefill", "racecheck", report.findings[0])
                assert not excused("decode", "racecheck", report.findings[0])
                assert not excused("prefill", "memcheck", report.findings[0])
    w, r = min(written), min(read)
    for places in (
        (f"Write {w}", f"Write {w}"),
        (f"Write {w}", f"Read {w}"),
        (f"Write {w}", "Read softmax.cuh:20"),
        ("Write pipeline.cuh:20", f"Read {r}"),
        (f"Write {w}", f"Read {r}", "Read softmax.cuh:20"),
        (f"Write {w}", f"Read {r}1"),
        (f"Write {w}",),
    ):
        assert not is_the_mailbox(parse(race(*places)).findings[0]), places
    unplaced = race(f"Write {w}", f"Read {r}").replace(f" in {r}", "")
    assert not is_the_mailbox(parse(unplaced).findings[0])


def test_only_words_that_are_handed_on_are_excused() -> None:
    symbol = next(v.symbol for v in every() if v.op == "decode" and v.bound)
    headers = {path.name: path.read_text() for path in CSRC.rglob("*.cuh")}
    compiled = {f"{symbol}.cu": source_of(symbol), **headers}

    def place(kind: str, text: str) -> str:
        ((name, number),) = (
            (name, n)
            for name, source in compiled.items()
            for n, line in enumerate(source.splitlines(), 1)
            if text in line
        )
        return f"{kind} {name}:{number}"

    template = "".join(path.read_text() for path in DECODE_TEMPLATES) + "".join(headers.values())
    for i, (written, read) in enumerate(HANDED_ON):
        assert all(template.count(text) == 1 for text in (*written, *read))
        others = [text for j, sides in enumerate(HANDED_ON) if j != i for text in sides[1]]
        for w in written:
            for r in read:
                for places in (
                    (place("Write", w), place("Read", r)),
                    (place("Read", r), place("Write", w)),
                ):
                    finding = parse(race(*places)).findings[0]
                    assert excused("decode", "racecheck", finding)
                    assert not excused("prefill", "racecheck", finding)
                    assert not excused("decode", "synccheck", finding)
            for r in others:
                places = (place("Write", w), place("Read", r))
                assert not excused("decode", "racecheck", parse(race(*places)).findings[0])
            same = (place("Write", w), place("Write", w))
            assert not excused("decode", "racecheck", parse(race(*same)).findings[0])


@pytest.mark.parametrize(
    ("report", "code", "verdict"),
    [
        (CLEAN, 0, None),
        (MEMCHECK.replace("some words", f"{LAUNCHED}\nsome words"), FOUND, 1),
        (CLEAN, 1, "exit code 1"),
        (CLEAN.replace(LAUNCHED, "launched 4 kernels"), 0, "launched 4"),
        (LAUNCHED, 0, "no summary"),
    ],
)
def test_runs_are_judged(report: str, code: int, verdict: str | int | None, tmp_path: Path) -> None:
    """A stand-in for the tool: it prints a report, and the arguments that it was given."""
    tool = tmp_path / "compute-sanitizer"
    (tmp_path / "report").write_text(report)
    tool.write_text(f'#!/bin/sh\necho "$@"\ncat {tmp_path}/report\nexit {code}\n')
    tool.chmod(0o755)
    if isinstance(verdict, str):
        with pytest.raises(AssertionError, match=verdict):
            start(str(tool), tmp_path, "prefill", "memcheck").report()
        return
    found, out = start(str(tool), tmp_path, "prefill", "memcheck", "--an-option").report()
    assert len(found.findings) == (verdict or 0)
    assert "--tool memcheck --error-exitcode 9" in out
    assert out.splitlines()[0].endswith("sanitize_target.py prefill")


# ---- the target, on the CPU path -----------------------------------------------------------------


def test_the_target_runs_and_is_representative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(prefill_gpu, "DEVICE", "cpu")
    kernels = [*sanitize_target.prefill("cpu"), *sanitize_target.decode("cpu")]
    assert kernels == [
        *map(sanitize_target.prefill_kernel, range(len(sanitize_target.PREFILL))),
        *map(sanitize_target.decode_kernel, range(len(sanitize_target.DECODE))),
    ]
    assert all(map(supported, kernels))
    for op in ("prefill", "decode"):
        own = [v for v in kernels if v.op == op]
        assert len(own) == len(set(own)) == len(getattr(sanitize_target, op.upper()))
        for field, values in DOMAINS[op].items():
            if field in ("rows", "q_dtype", "kv_dtype", "o_dtype"):
                continue
            missing = set(values) - {getattr(v, field) for v in own} - {None}
            assert not missing, f"{op}: no kernel with {field} of {missing}"


def test_line_information_is_all_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    v = every()[0]
    plain = _kernels.program_for(v)
    monkeypatch.setattr(_kernels, "program_for", _kernels.program_for)  # put back afterwards
    sanitize_target.compile_with_line_info()
    changed = _kernels.program_for(v)
    assert changed == sanitize_target.with_line_info(plain)
    assert changed.options == (*plain.options, "--generate-line-info")
    assert dataclasses.replace(changed, options=plain.options) == plain

"""Warmup: many kernels into one directory, through ninja and worker processes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashskip._jit import build as build_module
from flashskip._jit.build import build
from flashskip._jit.cache import KernelCache, entries
from flashskip._jit.compile import CompileError, Program
from flashskip._jit.error import FlashSkipError
from flashskip._jit.kernel import fetch, key_of
from flashskip._jit.render import Source

ROOT = Path(__file__).resolve().parent.parent
HEADERS = (("seven.cuh", 'int seven() { return 7; }  // "$HOME" é\n'),)


def program(number: int, body: str = "seven()") -> Program:
    text = (
        f'#include "seven.cuh"\nextern "C" __global__ void k{number}(int* p) {{ *p = {body}; }}\n'
    )
    return Program(f"k{number}", Source(text, HEADERS), block=32)


def test_what_is_missing_or_damaged_is_built_and_the_rest_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "it's a $place: ü"
    programs = [program(i) for i in range(3)]
    outcome = build(programs, out, jobs=2)
    assert (outcome.present, outcome.built, outcome.failed) == ((), ("k0", "k1", "k2"), ())
    assert "[3/3," in capfd.readouterr().out
    assert sorted(entry.path.name for entry in entries(out)) == sorted(os.listdir(out))

    assert build(programs, out, jobs=2).present == ("k0", "k1", "k2")
    assert capfd.readouterr().out == ""

    (out / key_of(programs[0]).file_name).write_bytes(b"damaged")
    (out / key_of(programs[2]).file_name).unlink()
    outcome = build(programs, out, jobs=2)
    assert (outcome.present, outcome.built, outcome.failed) == (("k1",), ("k0", "k2"), ())

    cache = KernelCache(tmp_path / "unused", [out], allow_build=False)
    assert all(fetch(p, cache).cubin.startswith(b"\x7fELF") for p in programs)
    assert not (tmp_path / "unused").exists()


def test_a_failure_is_shown_and_the_others_are_built(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the source is saved
    programs = [program(0), program(1, "eight()"), program(2)]
    outcome = build(programs, tmp_path / "out", jobs=1)
    assert (outcome.built, outcome.failed) == (("k0", "k2"), ("k1",))
    assert 'identifier "eight" is undefined' in capfd.readouterr().out
    with pytest.raises(CompileError):
        fetch(programs[1], KernelCache(None))


def test_the_program_arrives_unchanged(tmp_path: Path) -> None:
    """The worker's key is made from what it read: a difference would be another file."""
    odd = Program("k", Source(program(0).source.text.replace("k0", "k"), HEADERS), 32, 5, "sm_90")
    assert build([odd], tmp_path / "out", jobs=1).built == ("k",)


def test_an_interrupted_build_goes_on(tmp_path: Path) -> None:
    programs = [program(i) for i in range(8)]
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from test_jit_build import build, program
build([program(i) for i in range(8)], Path({str(tmp_path / "out")!r}), jobs=1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not entries(tmp_path / "out") and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = len(entries(tmp_path / "out"))
    assert 0 < done < 8
    outcome = build(programs, tmp_path / "out", jobs=2)
    assert (len(outcome.present), len(outcome.built)) == (done, 8 - done)


def test_a_worker_imports_neither_torch_nor_numpy_nor_the_driver(tmp_path: Path) -> None:
    build_module._write_ninja(tmp_path, [program(0)], tmp_path)
    (job,) = tmp_path.glob("*.json")
    code = f"""
import sys
from flashskip._jit import worker
assert worker.main({str(job)!r}) == 0
print(sorted(m for m in sys.modules if m in
    ("torch", "numpy", "jinja2", "cuda.core", "cuda.bindings.runtime")))
print("libcuda.so" in open("/proc/self/maps").read())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "[]\nFalse\n", done.stderr


def test_a_worker_that_cannot_write_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    build_module._write_ninja(tmp_path, [program(0)], tmp_path / "file")
    (job,) = tmp_path.glob("*.json")
    done = subprocess.run(
        [sys.executable, "-m", "flashskip._jit.worker", str(job)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 1
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_ninja_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FlashSkipError, match="pip install ninja"):
        build([program(0)], tmp_path / "out", jobs=1)


def test_the_jit_never_imports_its_parent() -> None:
    for path in (ROOT / "flashskip" / "_jit").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path
                assert node.level == 1 or not (node.module or "").startswith("flashskip"), path
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("flashskip") for alias in node.names), path

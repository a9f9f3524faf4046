"""Text to cubin, the key, and messages when something is wrong."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashskip._jit import compile as compile_module
from flashskip._jit.compile import CompileError, Program, compile_cubin, nvrtc_version
from flashskip._jit.render import Source
from flashskip.errors import CompileError as PublicCompileError

TEXT = '#include "ptx/two.cuh"\nextern "C" __global__ void k(int* p) { *p = two(); }\n'
HEADERS = (
    ("one.cuh", "int one() { return 1; }\n"),
    ("ptx/two.cuh", '#include "one.cuh"\nint two() { return 2 * one(); }\n'),
)
PROGRAM = Program("k", Source(TEXT, HEADERS), block=32)


def test_a_cubin_for_the_exact_architecture_and_its_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "flashskip"):
        compiled = compile_cubin(PROGRAM)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "Compiling entry function 'k' for 'sm_90a'" in compiled.log
    assert 0 < compiled.registers < 32
    assert (compiled.spill_stores, compiled.spill_loads) == (0, 0)
    assert compiled.seconds < 2
    before, after = [record.getMessage() for record in caplog.records]
    assert before == "compiling k for sm_90a"
    assert after.startswith("compiled k in ")


def test_compiling_is_deterministic() -> None:
    assert compile_cubin(PROGRAM).cubin == compile_cubin(PROGRAM).cubin


def test_spills_are_read_from_the_report() -> None:
    text = """
    extern "C" __global__ void k(float* p) {
      float x[64];
      for (int i = 0; i < 64; ++i) x[i] = p[i * 32 + threadIdx.x];
      for (int n = 0; n < 100; ++n)
        for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i + 7) % 64] + p[n];
      for (int i = 0; i < 64; ++i) p[i * 32 + threadIdx.x] = x[i];
    }"""
    program = Program("k", Source(text), block=32)
    tight = dataclasses.replace(program, options=(*program.options, "--maxrregcount=32"))
    assert compile_cubin(program).spill_stores == 0
    compiled = compile_cubin(tight)
    assert compiled.registers <= 32
    assert compiled.spill_stores > 0
    assert compiled.spill_loads > 0


def test_everything_that_the_compiler_sees_changes_the_key() -> None:
    source = PROGRAM.source
    one, two = HEADERS
    others = [
        dataclasses.replace(PROGRAM, symbol="k2"),
        dataclasses.replace(PROGRAM, arch="sm_100a"),
        dataclasses.replace(PROGRAM, options=(*PROGRAM.options, "-lineinfo")),
        dataclasses.replace(PROGRAM, source=Source(source.text + " ", HEADERS)),
        dataclasses.replace(PROGRAM, source=Source(source.text, (one, (two[0], two[1] + " ")))),
        dataclasses.replace(PROGRAM, source=Source(source.text, (("uno.cuh", one[1]), two))),
        dataclasses.replace(PROGRAM, source=Source(source.text, (one,))),
        # the same characters, cut otherwise
        dataclasses.replace(PROGRAM, symbol="k#", source=Source(source.text[1:], HEADERS)),
    ]
    assert len({p.content for p in [PROGRAM, *others]}) == 1 + len(others)
    assert PROGRAM.digest("13.0.88") != PROGRAM.digest("13.0.89")


def test_what_only_a_launch_needs_does_not_change_the_key() -> None:
    other = dataclasses.replace(PROGRAM, block=64, shared_bytes=1024)
    assert other.content == PROGRAM.content


def test_a_fault_is_shown_with_its_lines_and_the_source_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    headers = (HEADERS[0], ("ptx/two.cuh", "int two() {\n  return three();\n}\n"))
    with pytest.raises(CompileError) as caught:
        compile_cubin(Program("k", Source(TEXT, headers), block=32))
    message = str(caught.value)
    assert 'ptx/two.cuh(2): error: identifier "three" is undefined' in message
    assert ">    2 |   return three();" in message
    assert caught.value.path is not None
    assert f"source: {caught.value.path}" in message
    saved = Path(caught.value.path)
    assert saved.parent == tmp_path
    assert TEXT in saved.read_text()
    assert headers[1][1] in saved.read_text()
    assert caught.value.log
    assert PublicCompileError is CompileError


def test_only_what_is_passed_can_be_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compile_cubin(Program("k", Source('#include "stray.cuh"\n'), block=32))


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(CompileError, match=r"INVALID_OPTION.*sm_1x"):
        compile_cubin(dataclasses.replace(PROGRAM, arch="sm_1x"))


def test_the_version_is_the_package_s() -> None:
    assert nvrtc_version() == importlib.metadata.version("nvidia-cuda-nvrtc")
    code = (
        "import sys; from flashskip._jit.compile import nvrtc_version; nvrtc_version(); "
        "print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch', 'numpy')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert found.stdout.strip() == "[]"


def test_a_missing_nvrtc_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: "none")
    with pytest.raises(CompileError, match="pip install 'nvidia-cuda-nvrtc>=13,<14'"):
        compile_cubin(PROGRAM)


def test_another_nvrtc_than_the_package_s_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: "13.9.1")
    with pytest.raises(CompileError, match=r"NVRTC 13\.\d was loaded although .* 13\.9\.1"):
        compile_cubin(PROGRAM)


@pytest.mark.parametrize("version", [(12, 9), (14, 0)])
def test_a_wrong_major_version_names_the_package(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    from cuda.bindings import nvrtc

    result = (nvrtc.nvrtcResult.NVRTC_SUCCESS, *version)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: result)
    with pytest.raises(CompileError, match=r"NVRTC 1[24]\.\d was loaded.*pip install"):
        compile_cubin(PROGRAM)


def test_a_library_that_does_not_load_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def fail() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.13.*pip install"):
        compile_cubin(PROGRAM)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": root}

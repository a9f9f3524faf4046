"""A built wheel holds what it needs: it renders and compiles away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

COMPILE = """
import flashskip
from flashskip._jit import sources
from flashskip._jit.compile import compile_cubin
from flashskip._kernels import program_for
from flashskip.variant import matrix
variant = next(v for v in matrix() if v.op == "decode")
print(flashskip.__file__, sources.folder("templates"), sources.folder("csrc"), sep="\\n")
print(len(compile_cubin(program_for(variant)).cubin))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_sources_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"flashskip"}
    packed = {n.removeprefix("flashskip/_") for n in names if n.startswith("flashskip/_")}
    for folder in ("templates", "csrc"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file()]
        assert files
        assert {p.relative_to(ROOT).as_posix() for p in files} <= packed
    assert "flashskip/py.typed" in names
    assert any(n.endswith("/licenses/LICENSE") for n in names)


def test_core_dependencies(metadata):
    core = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(core) == ["cuda-python>=13", "jinja2", "ninja", "numpy", "torch>=2.9"]


def test_extras(metadata):
    extras = metadata.get_all("Provides-Extra")
    assert sorted(extras) == ["bench", "dev", "llm", "nvrtc", "test", "transformers"]


def test_wheel_compiles_a_kernel_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{COMPILE}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    package, templates, csrc, cubin = done.stdout.split()
    assert package == str(site / "flashskip" / "__init__.py")
    assert templates == str(site / "flashskip" / "_templates")
    assert csrc == str(site / "flashskip" / "_csrc")
    assert int(cubin) > 1000

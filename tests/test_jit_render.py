"""Templates to text, and the headers that the text reaches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from flashskip._jit import render as render_module
from flashskip._jit import sources
from flashskip._jit.render import render


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own: templates/ and csrc/ below tmp_path."""
    for folder in ("templates", "csrc/ptx"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(render_module.sources, "folder", lambda name: tmp_path / name)
    return tmp_path


def test_render_gives_the_text_and_only_the_headers_it_reaches(house: Path) -> None:
    (house / "templates/k.cu.jinja").write_text(
        '#include "a.cuh"\n'
        "  {% if flag %}\nconstexpr bool FLAG = {{ flag | cpp }};\n  {% endif %}\n"
        'constexpr int N = {{ n | cpp }};\n{% include "part.cuh.jinja" %}'
    )
    (house / "templates/part.cuh.jinja").write_text("int part_{{ n }}();\n")
    (house / "csrc/a.cuh").write_text('#pragma once\n#  include "ptx/b.cuh"  // why\n')
    (house / "csrc/ptx/b.cuh").write_text('#include "a.cuh"\n')
    (house / "csrc/unused.cuh").write_text("")
    source = render("k.cu.jinja", flag=True, n=3)
    assert source.text == (
        '#include "a.cuh"\nconstexpr bool FLAG = true;\nconstexpr int N = 3;\nint part_3();\n'
    )
    assert [name for name, _ in source.headers] == ["a.cuh", "ptx/b.cuh"]
    assert source.headers[1][1] == '#include "a.cuh"\n'


def test_an_undefined_name_is_an_error(house: Path) -> None:
    (house / "templates/k.cu.jinja").write_text("{{ tile_kv }}")
    with pytest.raises(jinja2.UndefinedError, match="tile_kv"):
        render("k.cu.jinja")


@pytest.mark.parametrize("value", [0.5, "x", None])
def test_cpp_spells_only_booleans_and_integers(house: Path, value: object) -> None:
    (house / "templates/k.cu.jinja").write_text("{{ value | cpp }}")
    with pytest.raises(TypeError, match="takes a bool or an int"):
        render("k.cu.jinja", value=value)


@pytest.mark.parametrize("name", ["missing.cuh", "../secret.cuh", "/etc/passwd"])
def test_a_header_outside_csrc_is_an_error(house: Path, name: str) -> None:
    (house / "secret.cuh").write_text("")
    (house / "templates/k.cu.jinja").write_text(f'#include "{name}"\n')
    with pytest.raises(FileNotFoundError, match=name):
        render("k.cu.jinja")


def test_an_installed_copy_renders_the_same(tmp_path: Path) -> None:
    """The layout of a wheel, in an odd place: same text, same key."""
    root = Path(__file__).resolve().parent.parent
    package = tmp_path / "an odd $place" / "flashskip"
    shutil.copytree(root / "flashskip", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "templates", package / "_templates")
    shutil.copytree(root / "csrc", package / "_csrc")
    code = """
from flashskip._kernels import program_for
from flashskip._jit import sources
from flashskip.variant import matrix
print(sources.folder("csrc"), [program_for(v).content for v in matrix()[:1]], sep="\\n")
"""
    seen = []
    for place in (root, package.parent):
        environment = {**os.environ, "PYTHONPATH": str(place)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.splitlines())
    assert [place for place, _ in seen] == [str(root / "csrc"), str(package / "_csrc")]
    assert seen[0][1] == seen[1][1]


def test_sources_are_beside_the_package_in_a_checkout() -> None:
    root = Path(__file__).resolve().parent.parent
    assert sources.folder("templates") == root / "templates"
    assert sources.folder("csrc") == root / "csrc"
    with pytest.raises(FileNotFoundError, match="reinstall flashskip"):
        sources.folder("nowhere")

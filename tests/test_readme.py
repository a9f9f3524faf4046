"""The README's own code, run as it stands (on a CPU where there is no GPU)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def run():
    def block_with(word: str) -> dict[str, object]:
        (code,) = (b for b in BLOCKS if word in b)
        names: dict[str, object] = {}
        exec(compile(code, f"README: {word}", "exec"), names)
        return names

    return block_with


def test_every_block_is_tested():
    assert len(BLOCKS) == 3


def test_prefill(run):
    names = run("BatchPrefillWrapper")
    out, lse = names["out"], names["lse"]
    assert (out.shape, out.dtype) == ((3000, 8, 64), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((3000, 8), torch.float32)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert 0 <= names["skipped"] < names["visited"]


def test_decode(run):
    out = run("BatchDecodeWrapper")["out"]
    assert (out.shape, out.dtype) == ((2, 8, 64), torch.bfloat16)
    assert out.isfinite().all()


@pytest.mark.llm
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_transformers(run):
    assert run("register")["attention"].stats("prefill") == []


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
def test_commands_are_make_targets(target):
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("command", re.findall(r"`flashskip (\w+)`", README))
def test_commands_are_known(command, capsys):
    from flashskip import cli

    with pytest.raises(SystemExit) as exit_status:
        cli.main([command, "--help"])
    assert exit_status.value.code == 0
    assert command in capsys.readouterr().out

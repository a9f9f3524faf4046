"""What files and environment may not do: run code, name paths, reach a shell, open a directory."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cold_start import ROOT, environment

from flashskip import _models, cli
from flashskip._jit.build import build
from flashskip._jit.cache import KernelCache
from flashskip._jit.compile import Program
from flashskip._jit.entry import Entry, Key
from flashskip._jit.render import Source
from flashskip._models import read_config, read_manifest
from flashskip.variant import every

PROGRAM = Program("k", Source('extern "C" __global__ void k() {}\n'), block=32)
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}

# Runs the command line and prints what Python's own audit saw of files, programs and sockets.
AUDITED = """
import json, sys
sys.path.insert(0, {root!r})
seen = []
def audit(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(("write", str(args[0])))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link"):
        if not (event in ("os.remove", "os.rmdir") and args[1] >= 0):  # below an open directory
            seen.append(("write", str(args[0])))
    elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        seen.append(("run", [str(a) for a in args[1]]))
    elif event in ("os.system", "pickle.find_class", "marshal.load") or event.startswith("socket"):
        seen.append(("other", event))
sys.addaudithook(audit)
from flashskip.cli import main
status = main({arguments!r})
print(json.dumps([status, seen]))
"""


def audited(*arguments: object, **changed: str) -> tuple[int, list[tuple[str, object]]]:
    code = AUDITED.format(root=str(ROOT), arguments=[*map(str, arguments)])
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], text=True, capture_output=True, timeout=120,
        env=environment(**changed),
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- files that a warmup reads -------------------------------------------------------------------

HOSTILE = {
    **CONFIG,
    "_name_or_path": "../../../../tmp/elsewhere",
    "auto_map": {"AutoConfig": "evil--code.Config", "AutoModel": "evil.py"},
    "model_type": "$(touch pwned)",
    "architectures": ["../../evil"],
    "attn_implementation": "evil/kernels",
    "sliding_window": "`touch pwned`",
    "__class__": "os.system",
}


def test_a_hostile_config_and_manifest_lead_nowhere(tmp_path: Path) -> None:
    """One kernel is built; nothing is written outside of the two directories that were named."""
    config, manifest = tmp_path / "config.json", tmp_path / "manifest"
    config.write_text(json.dumps(HOSTILE))
    model = read_config(config)
    assert (model.num_qo_heads, model.num_kv_heads, model.head_dim) == (8, 2, 64)
    manifest.write_text(f"{every()[0].symbol}\n")
    out, tmp = tmp_path / "out", tmp_path / "tmp"
    tmp.mkdir()
    status, seen = audited(
        "warmup", "--jobs", 1, "--manifest", manifest, "--out", out, TMPDIR=str(tmp)
    )
    assert status == 0
    written = {str(what) for how, what in seen if how == "write"}
    assert written
    assert all(path.startswith((str(out), str(tmp))) for path in written - {os.devnull}), written
    run = [what for how, what in seen if how == "run"]
    assert [Path(command[0]).name for command in run] == ["ninja"]
    assert not [what for how, what in seen if how == "other"]
    assert not list(tmp.iterdir())


@pytest.mark.parametrize(
    "line",
    ["../../etc/passwd", "/etc/passwd", "$(touch pwned)", "; touch pwned", "flashskip_prefill",
     "\x00", "é" * 50, "A" * 100_000, "%s%n", "{{7*7}}"],
)  # fmt: skip
def test_a_line_of_a_manifest_is_a_known_name_or_an_error(tmp_path: Path, line: str) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text(f"{every()[0].symbol}\n{line}\n")
    with pytest.raises(ValueError, match=r"/manifest: variant .* is unknown; expected one of"):
        read_manifest(manifest)


def unreadable(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """Things that are no text file, and what is said of them."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    yield "binary", tmp_path / "binary", "is not UTF-8 text"
    os.mkfifo(tmp_path / "pipe")
    yield "pipe", tmp_path / "pipe", "is not a file"
    yield "directory", tmp_path, "is not a file"
    yield "endless", Path("/dev/zero"), "is not a file"
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    yield "huge", tmp_path / "huge", "bytes"
    yield "missing", tmp_path / "missing", "No such file"


@pytest.mark.parametrize("option", ["--config", "--manifest"])
def test_what_is_no_text_file_is_named_and_not_waited_for(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, path, message in unreadable(tmp_path):
        assert cli.main(["warmup", option, str(path), "--out", str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert message in said
        assert str(path) in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"num_attention_heads": ' + "9" * 10_000 + "}",
     '{"num_attention_heads": 1e999}', '{"num_attention_heads": NaN}', "{}" * 1000],
    ids=["deep list", "deep object", "long number", "infinity", "nan", "many"],
)  # fmt: skip
def test_a_malicious_config_is_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["warmup", "--config", str(tmp_path / "config.json")]) == 1
    said = capsys.readouterr().err
    assert "config.json" in said
    assert said.count("\n") == 1
    assert len(said) < 1000


# ---- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_cache_is_private_whoever_makes_it(tmp_path: Path, umask: int) -> None:
    """Made by the first kernel, by `flashskip warmup` and by `flashskip doctor`."""
    (tmp_path / "manifest").write_text(every()[0].symbol)
    commands = (["doctor"], ["warmup", "--manifest", str(tmp_path / "manifest"), "--jobs", "1"])
    previous = os.umask(umask)
    try:
        KernelCache(tmp_path / "kernel").fetch(Key("c", "d"), lambda: Entry({}, b"x"))
        for arguments in commands if umask == 0 else ():
            subprocess.run(
                [sys.executable, "-m", "flashskip", *arguments], capture_output=True, timeout=120,
                env=environment(
                    FLASHSKIP_CACHE_DIR=str(tmp_path / arguments[0]), PYTHONPATH=str(ROOT)
                ), check=True,
            )  # fmt: skip
    finally:
        os.umask(previous)
    made = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(made) == (3 if umask == 0 else 1)
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_links_in_the_cache_lead_nothing_out(tmp_path: Path) -> None:
    """Links in place of the lock and of the entry: neither is followed when writing."""
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    cache.mkdir()
    key = Key("c", "d")
    (cache / f"{key.file_name}.lock").symlink_to(victim)
    (cache / key.file_name).symlink_to(victim)
    entry = KernelCache(cache).fetch(key, lambda: Entry({}, b"x"))
    assert entry.payload == b"x"
    assert not victim.exists()
    assert not (cache / key.file_name).is_symlink()
    victim.write_text("precious")
    (cache / key.file_name).unlink()
    (cache / key.file_name).symlink_to(victim)
    assert KernelCache(cache).fetch(key, lambda: Entry({}, b"x")).payload == b"x"
    assert victim.read_text() == "precious"


# ---- code, programs, shells ----------------------------------------------------------------------


def calls_in_the_package() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call, as (file, dotted name, node)."""
    for path in sorted((ROOT / "flashskip").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load",
    "pickle.loads", "marshal.load", "marshal.loads", "torch.load", "yaml.load", "shelve.open",
    "subprocess.getoutput", "subprocess.call", "os.execv", "os.spawnv",
}  # fmt: skip


def test_no_text_becomes_code_and_no_command_a_line_of_a_shell() -> None:
    programs = set()
    for path, name, node in calls_in_the_package():
        assert name not in FORBIDDEN, f"{path} calls {name}"
        assert "shell" not in {keyword.arg for keyword in node.keywords}, f"{path} asks for a shell"
        if name.startswith("subprocess."):
            programs.add(path)
            assert not isinstance(node.args[0], (ast.Constant, ast.JoinedStr)), path
    assert programs == {"flashskip/_jit/build.py"}
    for path in (ROOT / "flashskip").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            unsafe = {"pickle", "marshal", "shelve", "socket", "urllib", "http", "requests"}
            assert not {name.split(".")[0] for name in names} & unsafe, path


def test_an_interpreter_at_an_odd_path_is_quoted_for_ninja(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ninja gives its one command line to sh: a path in it must stay a path."""
    place = tmp_path / "a b'c\"d;touch pwned;$(touch pwned)`touch pwned`& ü"
    place.mkdir()
    (place / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    (place / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    outcome = build([PROGRAM], tmp_path / "out", jobs=1)
    assert outcome.built == ("k",)
    assert not list(tmp_path.rglob("pwned"))
    assert sorted(path.name for path in place.iterdir()) == ["python"]


def test_the_reader_of_text_has_a_limit() -> None:
    assert _models.LARGEST_BYTES <= 1 << 26

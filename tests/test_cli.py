"""The command line, the environment, and what a model's description leads to. No GPU needed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashskip import __version__, _doctor, _env, _kernels, cli
from flashskip._jit import build as build_module
from flashskip._jit import compile as compile_module
from flashskip._jit.cache import entries
from flashskip._jit.kernel import key_of
from flashskip._models import PRESETS, Model, read_config, read_manifest
from flashskip.variant import every, matrix, supported

ROOT = Path(__file__).resolve().parent.parent
DECODE = next(v for v in every() if v.op == "decode" and v.skip == "dense")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    for name in _env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHSKIP_CACHE_DIR", str(tmp_path / "cache"))
    _env.kernel_cache.cache_clear()
    yield tmp_path / "cache"
    _env.kernel_cache.cache_clear()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return call


# -- warmup --------------------------------------------------------------------------------------


def test_warmup_builds_and_the_second_run_does_nothing(
    run: Run, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "matrix", lambda: (DECODE,))
    out = tmp_path / "for the container"
    status, text, _ = run("warmup", "--arch", "sm_90a", "--jobs", 1, "--out", out)
    assert status == 0
    assert f"1 kernels for sm_90a into {out}" in text
    assert DECODE.symbol in text
    assert "1 built, 0 there before, 0 failed" in text
    status, text, _ = run("warmup", "--out", out)
    assert (status, "0 built, 1 there before, 0 failed" in text) == (0, True)
    assert not place.exists()
    # what a container does with it
    monkeypatch.setenv("FLASHSKIP_CACHE_SEED", str(out))
    monkeypatch.setenv("FLASHSKIP_DISABLE_JIT", "1")
    assert _env.kernel_cache().find(key_of(_kernels.program_for(DECODE))) is not None


def test_warmup_fails_when_a_kernel_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "matrix", lambda: (DECODE,))

    def fail(v: object) -> None:
        raise FileNotFoundError("no such template")

    with monkeypatch.context() as patch:
        patch.setattr(_kernels, "program_for", fail)
        status, text, errors = run("warmup", "--out", tmp_path / "out")
    assert (status, "0 built, 0 there before, 1 failed" in text) == (1, True)
    assert "no such template" in errors
    assert f"failed: {DECODE.symbol}" in errors
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "ninja_path", lambda: shutil.which("false"))
        status, text, errors = run("warmup", "--out", tmp_path / "out")
    assert (status, "1 failed" in text) == (1, True)


def test_warmup_into_an_impossible_place_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, errors = run("warmup", "--out", tmp_path / "file" / "out")
    assert status == 1
    assert errors.startswith("flashskip: ")
    assert errors.count("\n") == 1


def test_warmup_collects_all_that_its_arguments_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pretend(programs: list[object], directory: Path, jobs: int) -> build_module.Outcome:
        asked.extend(p.symbol for p in programs)  # type: ignore[attr-defined]
        return build_module.Outcome((), tuple(asked), ())

    monkeypatch.setattr(cli, "build", pretend)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "manifest").write_text(f"{DECODE.symbol}\n{DECODE.symbol}\n")
    status, _, _ = run(
        "warmup", "--config", tmp_path / "config.json", "--preset", "llama-3.1-8b",
        "--preset", "smollm2-135m", "--manifest", tmp_path / "manifest",
    )  # fmt: skip
    assert status == 0
    assert len(set(asked)) == len(asked)
    models = (read_config(tmp_path / "config.json"), PRESETS["llama-3.1-8b"])
    wanted = {v.symbol for model in models for v in model.variants("sm_90a")} | {DECODE.symbol}
    assert wanted <= set(asked)


@pytest.mark.parametrize(
    "arguments", [["--arch", "sm_80"], ["--preset", "gpt-9"], ["--jobs", "0"], ["--jobs", "many"]]
)
def test_warmup_refuses_wrong_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["warmup", *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {arguments[0]}:" in said
    assert repr(arguments[1]) in said
    assert "_positive" not in said


@pytest.mark.parametrize("option", ["--config", "--manifest"])
def test_a_file_that_is_not_there_is_named_with_its_option(run: Run, option: str) -> None:
    status, _, errors = run("warmup", option, "/nowhere")
    assert (status, errors.count("\n")) == (1, 1)
    assert f"{option} is /nowhere, which cannot be read (No such file" in errors


def test_a_file_is_no_directory_of_kernels(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert f"--out is {file}, which is no directory" in run("warmup", "--out", file)[2]
    monkeypatch.setenv("FLASHSKIP_CACHE_DIR", str(file))
    status, _, errors = run("cache", "verify")
    assert (status, f"(FLASHSKIP_CACHE_DIR) is {file}, which is no dir" in errors) == (1, True)
    assert f"{file} (no directory)" in run("cache", "info")[1]


# -- models --------------------------------------------------------------------------------------

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
}


def config_file(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


def test_a_config_gives_heads_dims_and_dtype(tmp_path: Path) -> None:
    assert read_config(config_file(tmp_path)) == Model(32, 8, 128)
    assert read_config(config_file(tmp_path, head_dim=64)).head_dim == 64
    assert read_config(config_file(tmp_path, num_key_value_heads=None)).num_kv_heads == 32
    assert read_config(config_file(tmp_path, dtype="float16")).dtype == "fp16"
    assert read_config(config_file(tmp_path, sliding_window=4096)).window
    assert not read_config(
        config_file(tmp_path, sliding_window=4096, use_sliding_window=False)
    ).window
    assert read_config(config_file(tmp_path, attn_logit_softcapping=50.0)).soft_cap
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"model_type": "vlm", "text_config": CONFIG}))
    assert read_config(nested) == Model(32, 8, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is None; expected a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": "../../etc"}, "num_attention_heads is '../../etc'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 10**30}, "num_attention_heads is 1000"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"torch_dtype": "float32"}, "dtype='float32'; kernels exist for bfloat16 and float16"),
        ({"torch_dtype": ["bfloat16"]}, r"dtype=\['bfloat16'\]"),
        ({"text_config": 3}, "expected an object"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(
    run: Run, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = config_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(path)
    status, _, errors = run("warmup", "--config", path)
    assert status == 1
    assert errors.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"x"', "\x00"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path / "config.json")


def test_a_model_reaches_every_option_of_its_shapes_and_nothing_else() -> None:
    variants = Model(32, 8, 128, "fp16").variants("sm_90a")
    assert len(set(variants)) == len(variants)
    assert all(map(supported, variants))
    assert {v.op for v in variants} == {"prefill", "decode"}
    for v in variants:
        assert (v.q_dtype, v.o_dtype, v.head_dim_qk, v.head_dim_vo) == ("fp16", "fp16", 128, 128)
        assert v.causal if v.op == "prefill" else v.rows in (8, 16, 24, 32)
    assert {v.skip for v in variants} >= {"dense", "threshold"}
    assert {v.kv_path for v in variants if v.op == "decode"} == {"paged_tma", "paged_gather"}
    assert {v.kv_dtype for v in variants} == {"fp16"}
    more = set(Model(32, 8, 128, "fp16").variants("sm_90a", fp8_cache=True)) - set(variants)
    assert {(v.op, v.kv_dtype) for v in more} == {("decode", "e4m3")}
    wide = Model(48, 1, 256).variants("sm_90a", fp8_cache=True)
    assert {(v.kv_dtype, v.rows) for v in wide if v.op == "decode"} == {("bf16", 40), ("e4m3", 16)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "one_token", "several"),
    [
        (8, 8, 8, {8}),
        (32, 8, 8, {8, 16, 24, 32}),
        (9, 1, 16, {24, 32, 40, 48, 56, 64}),
        (64, 1, 64, {64}),
        (71, 1, 64, {64}),
    ],
)
def test_decode_rows_are_those_of_the_group_and_of_1_to_8_tokens(
    heads: int, kv_heads: int, one_token: int, several: set[int]
) -> None:
    decode = [v for v in Model(heads, kv_heads, 64).variants("sm_90a") if v.op == "decode"]
    assert {v.rows for v in decode if not v.causal} == {one_token}
    assert {v.rows for v in decode if v.causal} == several


def test_an_fp8_cache_without_a_model_is_refused(run: Run) -> None:
    status, _, error = run("warmup", "--fp8-cache")
    assert status != 0
    assert "--fp8-cache is given without a model" in error


def test_a_model_without_a_causal_mask_has_no_decode_phase() -> None:
    variants = Model(24, 24, 128, causal=False).variants("sm_90a")
    assert {(v.op, v.causal) for v in variants} == {("prefill", False)}


def test_a_shape_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prefill kernel with head_dim_qk=80.*64, 96"):
        Model(32, 8, 80).variants("sm_90a")


def test_a_model_without_kernels_is_named_with_its_file(run: Run, tmp_path: Path) -> None:
    odd = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 80}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    status, _, errors = run("warmup", "--config", tmp_path / "odd.json")
    assert status == 1
    assert re.search(r"odd\.json: the model needs .*head_dim_qk=80.*64, 96.*\. Run it", errors)


@pytest.mark.parametrize(("inner", "dtype"), [({}, "fp16"), ({"dtype": "bfloat16"}, "bf16")])
def test_the_dtype_of_a_text_part_is_its_own_or_the_whole_models(
    tmp_path: Path, inner: dict[str, str], dtype: str
) -> None:
    text = {"num_attention_heads": 8, "hidden_size": 512, **inner}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": text, "torch_dtype": "float16"})
    )
    assert read_config(tmp_path / "config.json").dtype == dtype


def test_presets_are_reachable() -> None:
    for model in PRESETS.values():
        assert model.variants("sm_90a")


def test_a_manifest_gives_what_a_process_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "used"
    monkeypatch.setenv("FLASHSKIP_MANIFEST", str(manifest))
    used = [matrix()[0], matrix()[1], matrix()[0]]
    for v in used:
        _env.record_used(v.symbol)
    assert manifest.read_text().split() == [v.symbol for v in used]
    assert read_manifest(manifest) == used[:2]


def test_an_unknown_symbol_in_a_manifest_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_text("../../etc/passwd\n")
    status, _, errors = run("warmup", "--manifest", tmp_path / "manifest")
    assert status == 1
    assert "'../../etc/passwd' is unknown" in errors


def test_a_manifest_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHSKIP_MANIFEST", str(tmp_path))
    _env.record_used("symbol")
    (record,) = caplog.records
    assert "cannot append to FLASHSKIP_MANIFEST" in record.getMessage()


# -- variants, show, cache, doctor ---------------------------------------------------------------


def test_variants_lists_symbols(run: Run) -> None:
    status, text, _ = run("variants")
    assert (status, text.split()) == (0, [v.symbol for v in every()])
    assert run("variants", "--matrix")[1].split() == [v.symbol for v in matrix()]


def test_show_prints_the_source_and_the_report(run: Run, place: Path) -> None:
    status, text, _ = run("show", DECODE.symbol)
    assert status == 0
    program = _kernels.program_for(DECODE)
    assert program.source.text in text
    assert f"dynamic shared memory: {program.shared_bytes} bytes" in text
    assert "registers per thread" in text
    assert "spills: 0 bytes stored, 0 loaded" in text
    assert len(entries(place)) == 1


def test_show_of_an_unknown_variant_says_where_to_look(run: Run) -> None:
    status, _, errors = run("show", "flashskip_nothing")
    assert status == 1
    assert "flashskip variants" in errors


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"flashskip {__version__}\n")


@pytest.mark.parametrize("action", ["verify", "prune", "clear"])
def test_a_misspelt_directory_is_no_empty_cache(run: Run, tmp_path: Path, action: str) -> None:
    status, _, errors = run("cache", action, "--dir", tmp_path / "nowhere")
    assert status == 1
    assert "--dir is" in errors
    assert "Check the path" in errors


def test_cache_commands(run: Run, place: Path, tmp_path: Path) -> None:
    assert "not there yet" in run("cache", "info")[1]
    run("show", DECODE.symbol)
    (path,) = [entry.path for entry in entries(place)]
    assert f"directory  {place}\nkernels    1, " in run("cache", "info")[1]
    assert run("cache", "verify")[:2] == (0, f"1 kernels in {place}, 0 damaged\n")
    path.write_bytes(path.read_bytes()[:-1])
    status, text, _ = run("cache", "verify")
    assert (status, "1 damaged" in text, path.name in text) == (1, True, True)
    assert run("cache", "verify", "--dir", tmp_path)[0] == 0
    assert run("cache", "prune", "--max-mb", 100)[:2] == (0, "0 kernels removed\n")
    assert run("cache", "clear")[:2] == (0, "1 files removed\n")
    assert entries(place) == []


def test_doctor_reports_and_fails_only_where_kernels_cannot_be_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text, _ = run("doctor")
    assert status == 0, text
    for subject in ("flashskip", "sources", "torch", "cuda-python", "NVRTC", "ninja", "cache"):
        assert f"ok   {subject}" in text
    assert "GPU" in text
    monkeypatch.setattr(compile_module, "nvrtc_version", lambda: "none")
    monkeypatch.setenv("FLASHSKIP_CACHE_SEED", str(tmp_path / "missing"))
    monkeypatch.setattr(_doctor, "ninja_path", lambda: _raise("no ninja"))
    status, text, _ = run("doctor")
    assert status == 1
    assert "FAIL NVRTC" in text
    assert "pip install 'nvidia-cuda-nvrtc>=13,<14'" in text
    assert "FAIL seed" in text
    assert "FAIL ninja        no ninja" in text


def _raise(message: str) -> str:
    raise OSError(message)


def test_doctor_notes_a_cache_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHSKIP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    status, text, _ = run("doctor")
    assert status == 0
    assert "note cache" in text
    assert "set FLASHSKIP_CACHE_DIR to a writable directory" in text


@pytest.mark.parametrize("megabytes", ["-1", "0", "1.5"])
def test_doctor_fails_where_no_kernel_can_be_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, megabytes: str
) -> None:
    monkeypatch.setenv("FLASHSKIP_CACHE_MAX_MB", megabytes)
    status, text, _ = run("doctor")
    assert status == 1
    assert f"FAIL cache        FLASHSKIP_CACHE_MAX_MB='{megabytes}' is not a number" in text


def test_doctor_notes_a_manifest_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSKIP_MANIFEST", str(tmp_path / "manifest"))
    assert f"ok   manifest     {tmp_path / 'manifest'}" in run("doctor")[1]
    monkeypatch.setenv("FLASHSKIP_MANIFEST", str(tmp_path / "nowhere" / "manifest"))
    status, text, _ = run("doctor")
    assert status == 0
    assert "note manifest" in text
    assert "correct FLASHSKIP_MANIFEST" in text


def test_demo_gets_the_remaining_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    demo = types.SimpleNamespace(main=lambda argv: {"--tokens 5": 7}[" ".join(argv)])
    integrations = types.ModuleType("flashskip.integrations")
    integrations.demo = demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashskip.integrations", integrations)
    assert cli.main(["demo", "--tokens", "5"]) == 7


def test_the_module_runs_and_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flashskip", "variants"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 1
    assert "Traceback" not in errors


# -- environment ---------------------------------------------------------------------------------


def test_the_documentation_lists_every_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(_env.VARIABLES)
    used = re.compile(r"(environ|getenv).*FLASHSKIP_")
    readers = {p.name for p in (ROOT / "flashskip").rglob("*.py") if used.search(p.read_text())}
    assert readers == {"_env.py"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLASHSKIP_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"FLASHSKIP_CACHE_DIR": "~/b", "HOME": "/h"}, "/h/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/flashskip"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/flashskip"),
        ({"HOME": "/h"}, "/h/.cache/flashskip"),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("FLASHSKIP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _env.cache_dir() == Path(expected)


def test_without_a_home_the_cache_is_in_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASHSKIP_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert _env.cache_dir() is None
    assert _env.kernel_cache().directory is None
    status, _, errors = run("cache", "info")
    assert (status, "set FLASHSKIP_CACHE_DIR" in errors) == (1, True)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("FLASHSKIP_CACHE_MAX_MB", "0", _env.cache_max_bytes),
        ("FLASHSKIP_CACHE_MAX_MB", "-5", _env.cache_max_bytes),
        ("FLASHSKIP_CACHE_MAX_MB", "1e3", _env.cache_max_bytes),
        ("FLASHSKIP_DISABLE_JIT", "yes", _env.disable_jit),
        ("FLASHSKIP_LOG", "loud", _env.configure_logging),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'.*set it to"):
        read()


def test_values_that_mean_something(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_env.cache_max_bytes(), _env.disable_jit(), _env.cache_seeds()) == (1 << 30, False, ())
    monkeypatch.setenv("FLASHSKIP_CACHE_MAX_MB", "7")
    monkeypatch.setenv("FLASHSKIP_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHSKIP_CACHE_SEED", "/a:/b c::")
    assert (_env.cache_max_bytes(), _env.disable_jit()) == (7 << 20, True)
    assert _env.cache_seeds() == (Path("/a"), Path("/b c"))


def test_the_log_level_shows_lines_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import logging; from flashskip import _env; _env.configure_logging(); "
        "logging.getLogger('flashskip').info('compiling k')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHSKIP_LOG": "info"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stderr == "flashskip: compiling k\n"
    assert logging.getLogger("flashskip").level == logging.NOTSET


def test_disabled_compiling_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSKIP_DISABLE_JIT", "1")
    status, _, errors = run("show", DECODE.symbol)
    assert status == 1
    assert f"the kernel {DECODE.symbol} is not in the cache" in errors
    assert errors.count("\n") == 1

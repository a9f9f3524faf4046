"""GPU tests: skipped without a Hopper GPU, kernels built before the first one, and the receipt."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import receipt
import torch

START = pytest.StashKey[float]()
NOTES = pytest.StashKey[dict[str, Any]]()


def has_hopper() -> bool:
    """Whether a GPU is here that the kernels run on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def is_gpu_test(item: pytest.Item) -> bool:
    """Whether a test needs a Hopper GPU."""
    return any(item.get_closest_marker(name) for name in receipt.RECEIPTS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU that is not here."""
    for item in filter(is_gpu_test, items):
        if not has_hopper():
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)"))
        elif item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the kernels of the selected GPU tests in parallel, so that no test waits for one."""
    session.config.stash[START] = time.monotonic()
    if session.config.option.collectonly or not has_hopper():
        return
    wanted = {v for item in filter(is_gpu_test, session.items) for v in variants_of(item)}
    if wanted:
        build_kernels(wanted)


def variants_of(item: pytest.Item) -> Iterator[object]:
    """The Variants that a test names by `@pytest.mark.variants(list or function)`."""
    for marker in item.iter_markers("variants"):
        (named,) = marker.args
        if callable(named):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            accepted = inspect.signature(named).parameters
            named = named(**{k: v for k, v in params.items() if k in accepted})
        yield from named


def build_kernels(variants: set[object]) -> None:
    """Compile what the cache lacks, one process per core."""
    from flashskip import _env
    from flashskip._jit.build import build
    from flashskip._kernels import program_for

    directory = _env.cache_dir()
    if directory is None:
        return
    programs = [program_for(v) for v in sorted(variants, key=lambda v: v.symbol)]
    outcome = build(programs, directory, jobs=os.cpu_count() or 1)
    print(f"kernels for the GPU tests: {len(outcome.built)} built, {len(outcome.present)} present")
    if outcome.failed:
        print("not built:", *outcome.failed, sep="\n  ")


@pytest.fixture
def receipt_notes(pytestconfig: pytest.Config) -> dict[str, Any]:
    """What the tests of this run add to its receipt."""
    return pytestconfig.stash.setdefault(NOTES, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the receipt after a whole run of the GPU tests of one marker."""
    if not is_whole_gpu_run(session) or not has_hopper():
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    counts = {name: len(stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    stash = session.config.stash
    seconds, notes = time.monotonic() - stash[START], stash.get(NOTES, {})
    receipt.write(session.config.option.markexpr, counts, seconds, notes)


def is_whole_gpu_run(session: pytest.Session) -> bool:
    """Whether every test of one GPU marker was selected, and all of them ran."""
    option = session.config.option
    narrowed = option.keyword or getattr(option, "lf", False) or option.collectonly
    stopped = session.shouldfail or session.shouldstop or not session.testscollected
    paths = {Path(arg).resolve() for arg in session.config.args}
    whole = bool(paths & {receipt.ROOT, receipt.ROOT / "tests"})
    return whole and option.markexpr in receipt.RECEIPTS and not narrowed and not stopped

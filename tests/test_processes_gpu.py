"""What a process does first on a GPU: cold starts, capture before any run, fork, torch.compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reported import BF16, assert_close, decode_variant, normal, paged, prefill_variant, ref64

import flashskip
from flashskip import _kernels
from flashskip._jit.build import build

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
SKIPS = {"skip_softmax_threshold": 0.01, "collect_stats": True}
THREE = [prefill_variant(causal=True), decode_variant(), decode_variant(**SKIPS)]

# Three kernels against plain attention, in a process of its own.
COMMON = f"""
import logging, os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
from reported import *
HEADS, SKIPS = (32, 8), {SKIPS!r}
requests = normal(3, [1, 1], [1000, 300], HEADS)

def judge():
    for attend, options in ((prefill, dict(causal=True)), (decode, dict()), (decode, SKIPS)):
        answer = attend(requests, "cuda", **options)
        if options is not SKIPS:
            for i, request in enumerate(requests):
                assert_right(request, answer.out[i], answer.lse[i], causal=True)
        assert all(t.isfinite().all() for t in answer.out)
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code], text=True,
        env={**os.environ, "FLASHSKIP_LOG": "info", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, log = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, log
    return out + log


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a warmup made."""
    directory = tmp_path_factory.mktemp("warm")
    assert not build([_kernels.program_for(v) for v in THREE], directory, jobs=3).failed
    return directory


def test_reported_J01_eight_processes_start_cold_on_one_gpu(tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"print('ready', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    cold = {"FLASHSKIP_CACHE_DIR": str(tmp_path / "cache")}
    processes = [start(code + "judge()", **cold) for _ in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.write_text("")
    logs = "".join(finish(process) for process in processes)
    assert logs.count("flashskip: compiling ") == 3
    assert logs.count("flashskip: compiled ") == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_graph_capture_is_the_first_use_after_a_warmup(warm: Path, tmp_path: Path) -> None:
    """Nothing ran before the capture, nothing may be compiled, and nothing waits for the GPU."""
    code = """
import flashskip
from helpers import indptr
q, k, v = (torch.cat(parts).cuda() for parts in zip(*requests))
lengths = indptr([1, 1], "cuda"), indptr([1000, 300], "cuda")
cache = paged(requests, "cuda")
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
prefiller, decoder, skipper = (flashskip.BatchPrefillWrapper(), flashskip.BatchDecodeWrapper(),
                               flashskip.BatchDecodeWrapper())
prefiller.plan(*lengths, *HEADS, 128, q_data_type=BF16, causal=True)
decoder.plan(*cache.table, *HEADS, 128, 16, q_data_type=BF16)
skipper.plan(*cache.table, *HEADS, 128, 16, q_data_type=BF16, **SKIPS)
graph = torch.cuda.CUDAGraph()
torch.cuda.set_sync_debug_mode("default")  # the capture itself waits
with torch.cuda.graph(graph):
    outs = [prefiller.run(q, k, v), decoder.run(q, cache.pages), skipper.run(q, cache.pages)]
graph.replay()
torch.cuda.set_sync_debug_mode("error")
again = [prefiller.run(q, k, v), decoder.run(q, cache.pages), skipper.run(q, cache.pages)]
torch.cuda.set_sync_debug_mode("default")
for out, other in zip(outs, again):
    assert torch.equal(out, other)
for out in outs[:2]:
    for i, request in enumerate(requests):
        assert_right(request, out[i : i + 1].cpu(), causal=True)
"""
    log = finish(
        start(
            code, FLASHSKIP_CACHE_DIR=str(tmp_path / "none"), FLASHSKIP_CACHE_SEED=str(warm),
            FLASHSKIP_DISABLE_JIT="1",
        )
    )  # fmt: skip
    assert "compiling" not in log


def test_children_of_a_fork_use_the_gpu(warm: Path) -> None:
    """The parent imported and even attended on the CPU; nothing of that stands in the way."""
    code = """
torch.set_num_threads(1)  # or the children would wait for the parent's threads of OpenMP
answer = prefill(requests, "cpu", causal=True)
if not torch.cuda.is_initialized():
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            judge()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    judge()
    print("forked")
"""
    assert "forked" in finish(start(code, FLASHSKIP_CACHE_DIR=str(warm)))


def test_reported_J07_a_driver_without_a_device_is_one_line(warm: Path) -> None:
    code = "from flashskip.cli import main\nsys.exit(main(['doctor']))"
    log = finish(start(code, CUDA_VISIBLE_DEVICES="", FLASHSKIP_CACHE_DIR=str(warm)))
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith("note GPU")]
    assert "no CUDA-capable device is detected" in line
    code = """
from flashskip import _kernels
from flashskip.errors import DriverError
try:
    _kernels.kernel_for(decode_variant())
except DriverError as error:
    print(str(error).count(chr(10)), "more lines:", error)
"""
    log = finish(start(code, CUDA_VISIBLE_DEVICES="", FLASHSKIP_CACHE_DIR=str(warm)))
    assert "0 more lines: CUDA driver error 100 " in log


# ---- I05: the compiler of torch ------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("cc") is None, reason="torch's compiler needs a C compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.variants(THREE)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_reported_I05_the_inductor_gives_the_same_bits(mode: str) -> None:
    requests = normal(3, [1, 1], [1000, 300], (32, 8))
    cache = paged(requests, "cuda")
    wrapper = flashskip.BatchDecodeWrapper()
    wrapper.plan(*cache.table, 32, 8, 128, 16, q_data_type=BF16)
    torch._dynamo.reset()

    def attend(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return wrapper.run(q * 2, pages) + 1  # type: ignore[operator]

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    q = torch.cat([r[0] for r in requests]).cuda()
    for step in range(5):
        mine = q * (1 + step / 4)
        found, expected = compiled(mine, cache.pages).clone(), attend(mine, cache.pages)
        assert torch.equal(found, expected)
    found = wrapper.run(mine * 2, cache.pages)  # whose 1 more would round away what is compared
    for i, (_, k, v) in enumerate(requests):
        exact, _ = ref64((mine[i : i + 1].cpu() * 2, k, v))
        assert_close(found[i : i + 1].cpu(), exact)

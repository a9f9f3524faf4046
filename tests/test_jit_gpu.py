"""Load, tensor maps and launch on a real GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest

from flashskip._jit.cache import KernelCache
from flashskip._jit.compile import Program
from flashskip._jit.kernel import Kernel, load
from flashskip._jit.params import ParamTable, pointer_to
from flashskip._jit.render import Source
from flashskip._jit.tensor_map import tensor_map

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PARAMS = ParamTable(
    "CopyParams", [("x_map", "TensorMap"), ("y", "float*"), ("scale", "float"), ("n", "int64_t")]
)

# Copies box (column 64, row 1) of a bf16 matrix through TMA into 100 KB of shared memory, then out.
COPY_BOX = """
using int64_t = long long;
struct alignas(64) TensorMap { unsigned char opaque[128]; };
STRUCT
extern "C" __global__ void copy_box(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char box[];
  __shared__ __align__(8) unsigned long long loaded;
  unsigned box_at = static_cast<unsigned>(__cvta_generic_to_shared(box));
  unsigned loaded_at = static_cast<unsigned>(__cvta_generic_to_shared(&loaded));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(loaded_at));
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(loaded_at));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(box_at),
        "l"(&p.x_map), "r"(64), "r"(1), "r"(loaded_at) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred d; mbarrier.try_wait.parity.shared::cta.b64 d, [%1], 0;"
                 " selp.u32 %0, 1, 0, d; }" : "=r"(done) : "r"(loaded_at) : "memory");
  for (int i = threadIdx.x; i < p.n; i += blockDim.x)
    p.y[i] = p.scale * __uint_as_float(unsigned(reinterpret_cast<unsigned short*>(box)[i]) << 16);
}
""".replace("STRUCT", PARAMS.c_struct)

NOTHING_PARAMS = ParamTable("NothingParams", [("x", "float*"), ("n", "int32_t")])
NOTHING = f"""
using int32_t = int;
{NOTHING_PARAMS.c_struct}
extern "C" __global__ void nothing(const __grid_constant__ Params p) {{}}
"""


def kernel(symbol: str, text: str, shared_bytes: int = 0) -> Kernel:
    program = Program(symbol, Source(text), block=128, shared_bytes=shared_bytes)
    loaded = load(program, KernelCache(None))
    loaded.prepare(torch.cuda.current_device())
    return loaded


def test_tma_copy_through_a_launch() -> None:
    copy = kernel("copy_box", COPY_BOX, shared_bytes=100 * 1024)
    x = torch.randn(8, 96, device="cuda", dtype=torch.bfloat16)
    y = torch.full((512,), float("nan"), device="cuda")
    record = PARAMS.new()
    record["x_map"] = tensor_map(x.data_ptr(), "bf16", (96, 8), (192,), (64, 8), 0)
    record["y"], record["scale"], record["n"] = y.data_ptr(), 2.0, 512
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy.launch(1, pointer_to(record), stream.cuda_stream)
    record["y"] = 0  # the launch has its own copy
    stream.synchronize()
    expected = torch.zeros(8, 64, device="cuda")
    expected[:7, :32] = 2.0 * x[1:, 64:].float()  # beyond the matrix: zeros
    assert torch.equal(y.view(8, 64), expected)
    assert copy.registers > 0


def test_launch_in_a_graph() -> None:
    copy = kernel("copy_box", COPY_BOX, shared_bytes=100 * 1024)
    x = torch.ones(8, 128, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(512, device="cuda")
    record = PARAMS.new()
    record["x_map"] = tensor_map(x.data_ptr(), "bf16", (128, 8), (256,), (64, 8), 0)
    record["y"], record["scale"], record["n"] = y.data_ptr(), 1.0, 512
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.launch(1, pointer_to(record), torch.cuda.current_stream().cuda_stream)
    record["scale"] = 100.0
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 3.0 * 64 * 7


def test_bad_launch_says_what_and_why() -> None:
    nothing = kernel("nothing", NOTHING)
    record = NOTHING_PARAMS.new()
    with pytest.raises(RuntimeError, match=r"launching nothing with 0 blocks of 128.*CUDA_"):
        nothing.launch(0, pointer_to(record), 0)


def test_bad_tensor_map_says_what_and_why() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE.*strides \(100,\)"):
        tensor_map(1 << 20, "bf16", (96, 8), (100,), (64, 8), 0)


def test_launch_costs_little() -> None:
    nothing = kernel("nothing", NOTHING)
    record = NOTHING_PARAMS.new()
    pointer = pointer_to(record)
    microseconds = {}
    for name, grid in (("launch", 1), ("launch of 132 blocks", 132)):
        times = []
        for _ in range(2000):
            start = time.perf_counter_ns()
            nothing.launch(grid, pointer, 0)
            times.append(time.perf_counter_ns() - start)
            torch.cuda.synchronize()
        microseconds[name] = np.median(times) / 1000
    x = torch.ones(8, 128, device="cuda", dtype=torch.bfloat16)
    for name, address_step in (("tensor map, memoised", 0), ("tensor map, new", 16)):
        times = []
        for step in range(1, 200):
            start = time.perf_counter_ns()
            tensor_map(x.data_ptr() + step * address_step, "bf16", (128, 8), (256,), (64, 8), 128)
            times.append(time.perf_counter_ns() - start)
        microseconds[name] = np.median(times) / 1000
    for name, p50 in microseconds.items():
        print(f"{name}: p50 {p50:.2f} us")
    assert microseconds["launch"] < 20

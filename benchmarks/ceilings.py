"""What the machine can do, measured in the same run: matrix products, copies, reads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import Clock, interleave

_GEMM = 8192
_COPY_BYTES = 4 << 30


def matrix_product(device: torch.device, n: int = _GEMM) -> Callable[[], object]:
    """Return a call that multiplies two bf16 matrices of n x n."""
    a, b, c = (torch.randn(n, n, device=device).bfloat16() for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def measure(clock: Clock) -> dict[str, float]:
    """Return TFLOP/s of a bf16 matrix product, and GB/s of a copy (read plus write) and of reads.

    Reads are the best of three library kernels that read much and write little.
    """
    device, small = clock.device, clock.device.type == "cpu"
    n = 256 if small else _GEMM
    elements = (1 << 20 if small else _COPY_BYTES) // 2
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    matrix, vector = source.view(-1, 4096), torch.randn(4096, device=device).bfloat16()
    calls = {
        "gemm": matrix_product(device, n),
        "copy": lambda: target.copy_(source),
        "sum": lambda: source.view(torch.float32).sum(),
        "max": lambda: source.view(torch.int32).amax(),
        "gemv": lambda: torch.mv(matrix, vector),
    }
    for call in calls.values():
        call()
    timings = interleave(calls, clock)
    ms = {name: timing.median_ms for name, timing in timings.items()}
    read_ms = min(ms[name] for name in ("sum", "max", "gemv"))
    return {
        "gemm_tflops": 2 * n**3 / ms["gemm"] / 1e9,
        "copy_gbps": 4 * elements / ms["copy"] / 1e6,
        "read_gbps": 2 * elements / read_ms / 1e6,
    }

"""Every kernel of the matrix compiles for sm_90a without a GPU, without a complaint."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashskip import _kernels
from flashskip._jit.compile import compile_cubin
from flashskip._tiles import MAX_SHARED_BYTES
from flashskip.variant import matrix

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(scope="module")
def compiled():
    """All kernels of the matrix; NVRTC releases the interpreter while it works."""
    programs = [_kernels.program_for(v) for v in matrix()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(matrix(), pool.map(compile_cubin, programs), strict=True))


def test_nothing_spills_and_nothing_is_serialized(compiled):
    for v, c in compiled.items():
        assert c.spill_stores == 0, v.symbol
        assert c.spill_loads == 0, v.symbol
        assert "serialized" not in c.log, f"{v.symbol}: {c.log}"


def test_registers_and_shared_memory_fit(compiled):
    for v, c in compiled.items():
        assert _kernels.program_for(v).shared_bytes <= MAX_SHARED_BYTES, v.symbol
        assert c.registers * _kernels.program_for(v).block <= 65536, v.symbol


def _nvdisasm():
    import nvidia

    for root in nvidia.__path__:
        for found in Path(root).rglob("nvdisasm"):
            return found
    return None


@pytest.fixture(scope="module")
def listings(compiled, tmp_path_factory):
    """Disassembly of each kernel."""
    tool = _nvdisasm()
    assert tool is not None, "install nvidia-cuda-nvdisasm (extra `test`)"
    folder = tmp_path_factory.mktemp("sass")
    texts = {}
    for v, c in compiled.items():
        path = folder / f"{v.symbol}.cubin"
        path.write_bytes(c.cubin)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
        texts[v] = done.stdout
    return texts


@pytest.fixture(scope="module")
def sass(listings):
    """Instruction names of each kernel."""
    name = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)")
    return {v: name.findall(text) for v, text in listings.items()}


def test_no_access_has_its_descriptor_in_an_odd_register(listings):
    """ptxas 13.0 writes such copies for some sums of addresses: illegal instructions on the GPU."""
    for v, text in listings.items():
        descriptors = re.findall(r"\bdesc\[UR(\d+)\]", text)
        assert descriptors, v.symbol
        assert not [d for d in descriptors if int(d) % 2], v.symbol


def test_the_instructions_that_make_them_fast_are_there(sass):
    for v, names in sass.items():
        matrix_ops = [n for n in names if n.startswith("HGMMA")]
        waits = [n for n in names if n.startswith("WARPGROUP.DEPBAR")]
        assert matrix_ops, v.symbol
        assert not [n for n in names if n.startswith(("HMMA", "LDL", "STL"))], v.symbol
        # As many waits as matrix instructions would mean that the compiler serialised them.
        assert len(waits) < len(matrix_ops) / 2, v.symbol
        loads = "LDGSTS" if v.kv_path == "paged_gather" else "UTMALDG"
        assert any(n.startswith(loads) for n in names), v.symbol


def test_a_dense_prefill_carries_nothing_of_the_vote(sass):
    """The warps of a unit vote through one byte each in shared memory (csrc/vote.cuh)."""
    for v, names in sass.items():
        if v.op == "prefill":
            votes = any(n.startswith("STS.U8") for n in names)
            assert votes == (v.skip != "dense"), v.symbol

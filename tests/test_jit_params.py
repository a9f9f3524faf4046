"""One list of parameters, two layouts that agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashskip._jit.compile import CompileError, Program, compile_cubin
from flashskip._jit.params import ParamTable
from flashskip._jit.render import Source

FIELDS = [
    ("batch_size", "int32_t"),
    ("map", "TensorMap"),
    ("o", "void*"),
    ("sm_scale", "float"),
    ("nnz", "int64_t"),
    ("indptr", "const int32_t*"),
    ("flags", "uint32_t"),
    ("seed", "uint64_t"),
    ("last", "float"),
]
TYPES = """
using int32_t = int; using uint32_t = unsigned; using int64_t = long long;
using uint64_t = unsigned long long;
struct alignas(64) TensorMap { unsigned char opaque[128]; };
"""


def compile_struct(struct: str) -> None:
    text = TYPES + struct + '\nextern "C" __global__ void k(const __grid_constant__ Params p) {}'
    compile_cubin(Program("k", Source(text), block=32))


def test_the_compiler_agrees_with_every_offset_and_the_size() -> None:
    table = ParamTable("TestParams", FIELDS)
    assert table.dtype.fields["map"][1] == 64
    assert table.dtype.itemsize % 64 == 0
    compile_struct(table.c_struct)


def test_without_a_tensor_map_the_struct_is_packed_as_c_does() -> None:
    table = ParamTable("Small", [("a", "int32_t"), ("b", "float*"), ("c", "float")])
    assert table.dtype.itemsize == 24
    assert "alignas" not in table.c_struct
    compile_struct(table.c_struct)


@pytest.mark.parametrize("wrong", ["== 192", "sizeof(TestParams) == 256"])
def test_a_wrong_offset_or_size_does_not_compile(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the source is saved
    struct = ParamTable("TestParams", FIELDS).c_struct
    assert wrong in struct
    with pytest.raises(CompileError, match="static assertion"):
        compile_struct(struct.replace(wrong, wrong[:-1] + "9", 1))


def test_new_records_are_zero_aligned_and_apart() -> None:
    table = ParamTable("TestParams", FIELDS)
    records = [table.new() for _ in range(5)]
    for record in records:
        assert record.ctypes.data % 64 == 0
        assert record.nbytes == table.dtype.itemsize
        assert not record.tobytes().strip(b"\0")
    records[0]["map"] = np.arange(128, dtype=np.uint8)
    records[0]["o"] = 1 << 63
    assert records[0].tobytes()[64:192] == bytes(range(128))
    assert not records[1].tobytes().strip(b"\0")


def test_a_wrong_table_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"P\.x has type 'double'; expected a pointer or one of TensorMap"
    ):
        ParamTable("P", [("x", "double")])
    with pytest.raises(ValueError, match="P names a field twice"):
        ParamTable("P", [("x", "float"), ("x", "float")])

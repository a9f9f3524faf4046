"""One list of kernel parameters: the C struct and the numpy record are both made from it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np

# C type -> (numpy format, alignment in bytes). Pointers of any type are 64-bit integers.
_TYPES: dict[str, tuple[Any, int]] = {
    "TensorMap": ((np.uint8, (128,)), 64),
    "int32_t": (np.int32, 4),
    "uint32_t": (np.uint32, 4),
    "int64_t": (np.int64, 8),
    "uint64_t": (np.uint64, 8),
    "float": (np.float32, 4),
}
_POINTER = (np.uint64, 8)
_RECORD_ALIGNMENT = 64  # bytes; what a TensorMap needs


class ParamTable:
    """The complete list of what a launch passes, as one struct.

    Parameters
    ----------
    name
        C++ name of the struct; kernels may also call it ``Params``.
    fields
        Pairs of field name and C type: ``TensorMap``, ``int32_t``, ``uint32_t``, ``int64_t``,
        ``uint64_t``, ``float`` or any pointer.

    Attributes
    ----------
    c_struct : str
        The struct's text, with assertions of its size and of every offset.
    dtype : numpy.dtype
        The same layout. A tensor map is ``uint8[128]``, a pointer ``uint64``.

    Raises
    ------
    ValueError
        A field's type is not in the list above, or a field is named twice.
    """

    def __init__(self, name: str, fields: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.dtype = _layout(name, self.fields)
        self.c_struct = _c_struct(name, self.fields, self.dtype)

    def new(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """Return one zeroed record, shape ``()``, whose address is a multiple of 64."""
        size = self.dtype.itemsize
        memory = np.zeros(size + _RECORD_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _RECORD_ALIGNMENT
        return memory[start : start + size].view(self.dtype).reshape(())


def pointer_to(record: np.ndarray[Any, np.dtype[np.void]]) -> c_void_p:
    """Return what `Kernel.launch` is given of a record; it must not outlive the record."""
    return c_void_p(record.ctypes.data)


def _format(name: str, field: str, c_type: str) -> tuple[Any, int]:
    if c_type.endswith("*"):
        return _POINTER
    if c_type not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(
            f"{name}.{field} has type {c_type!r}; expected a pointer or one of {known}"
        )
    return _TYPES[c_type]


def _layout(name: str, fields: tuple[tuple[str, str], ...]) -> np.dtype[np.void]:
    """Lay the fields out as C does."""
    names = [field for field, _ in fields]
    if len(set(names)) != len(names):
        raise ValueError(f"{name} names a field twice: {names}")
    formats, offsets, end, alignment = [], [], 0, 1
    for field, c_type in fields:
        numpy_format, field_alignment = _format(name, field, c_type)
        offset = -(-end // field_alignment) * field_alignment
        formats.append(numpy_format)
        offsets.append(offset)
        end = offset + np.dtype(numpy_format).itemsize
        alignment = max(alignment, field_alignment)
    itemsize = -(-end // alignment) * alignment
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    return np.dtype(layout)  # type: ignore[call-overload, no-any-return]


def _offset_of(name: str, field: str) -> str:
    """Spell offsetof: NVRTC has no macro of that name, only what the macro is made of."""
    return f"__INTADDR__(&(({name}*)0)->{field})"


def _c_struct(name: str, fields: tuple[tuple[str, str], ...], dtype: np.dtype[np.void]) -> str:
    assert dtype.fields is not None
    has_map = any(c_type == "TensorMap" for _, c_type in fields)
    lines = [f"struct {'alignas(64) ' if has_map else ''}{name} {{"]
    lines += [f"  {c_type} {field};" for field, c_type in fields]
    lines += ["};", f"using Params = {name};"]
    lines += [
        f'static_assert({_offset_of(name, field)} == {dtype.fields[field][1]}, "{field}");'
        for field, _ in fields
    ]
    lines.append(
        f"static_assert(sizeof({name}) == {dtype.itemsize}, "
        f'"{name} has the size that the host passes");'
    )
    return "\n".join(lines)

"""From a model's description to the kernels that it can reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .variant import DOMAINS, Variant, every, unit_rows

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
LARGEST_BYTES = 1 << 24  # of a file that is read as text
_SEVERAL_TOKENS = range(2, 9)  # q_len_per_req of a decode that is given more than one


@dataclass(frozen=True)
class Model:
    """What of a model decides which kernels it reaches. `dtype` is ``"bf16"`` or ``"fp16"``."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    causal: bool = True  # a model that is not has no decode phase
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False

    def variants(self, arch: str, *, fp8_cache: bool = False) -> list[Variant]:
        """Return every Variant that these shapes can reach, whatever options are used.

        With `fp8_cache` those of decode on an FP8 cache too.

        Raises
        ------
        ValueError
            There is no kernel for one of the shapes; the message names it and the alternatives.
        """
        found = self._of_operation("prefill", arch, causal={self.causal})
        if self.causal:
            group_size = self.num_qo_heads // self.num_kv_heads
            for kv_dtype in (self.dtype, "e4m3") if fp8_cache else (self.dtype,):
                for q_lens, causal in (((1,), False), (_SEVERAL_TOKENS, True)):
                    rows: set[object] = {
                        unit_rows(group_size * q_len, kv_dtype, self.head_dim) for q_len in q_lens
                    }
                    found += self._of_operation(
                        "decode", arch, rows=rows, causal={causal}, kv_dtype={kv_dtype}
                    )
        return found

    def _of_operation(self, op: str, arch: str, **more: set[object]) -> list[Variant]:
        wanted: dict[str, set[object]] = {
            "q_dtype": {self.dtype},
            "o_dtype": {self.dtype},
            "head_dim_qk": {self.head_dim},
            "head_dim_vo": {self.head_dim},
            "window": {False, self.window},  # windowed models have full layers too
            "soft_cap": {self.soft_cap},
            "sinks": {self.sinks},
            "arch": {arch},
            **more,
        }
        for field, values in wanted.items():
            missing = values.difference(DOMAINS[op][field])
            if missing:
                raise ValueError(
                    f"the model needs a {op} kernel with {field}={missing.pop()!r}, which does not "
                    f"exist; there are: {', '.join(map(str, DOMAINS[op][field]))}. Run it with "
                    "another implementation of attention"
                )
        return [
            v
            for v in every()
            if v.op == op and all(getattr(v, field) in wanted[field] for field in wanted)
        ]


PRESETS = {
    "flux.1-dev": Model(24, 24, 128, causal=False),
    "llama-3.1-8b": Model(32, 8, 128),
    "llama-3.1-70b": Model(64, 8, 128),
    "qwen3-8b": Model(32, 8, 128),
    "smollm2-135m": Model(9, 3, 64),
    "wan2.1-14b": Model(40, 40, 128, causal=False),
}


def read_config(path: Path) -> Model:
    """Read the ``config.json`` of a causal language model from Hugging Face.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or lacks what decides the kernels; the message names the key.
    """
    text = _read_text(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    whole = config if isinstance(config, dict) else {}
    if isinstance(config, dict):  # models of several parts describe the text part inside
        config = config.get("text_config") or config
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a model's description: expected an object")
    num_qo_heads = _count(path, config, "num_attention_heads")
    num_kv_heads = _count(path, config, "num_key_value_heads", num_qo_heads)
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads={num_qo_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if config.get("head_dim") is None:
        head_dim = _count(path, config, "hidden_size") // num_qo_heads
    else:
        head_dim = _count(path, config, "head_dim")
    names = [part.get(key) for part in (config, whole) for key in ("dtype", "torch_dtype")]
    dtype = next((name for name in names if name is not None), "bfloat16")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(
            f"{path}: dtype={dtype!r}; kernels exist for {' and '.join(_DTYPES)}. Set dtype to the "
            "one that the model is run in"
        )
    return Model(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        dtype=_DTYPES[dtype],
        window=bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False,
        soft_cap=bool(config.get("attn_logit_softcapping")),
        sinks=config.get("model_type") == "gpt_oss",
    )


def read_manifest(path: Path) -> list[Variant]:
    """Read the kernels that a process recorded in FLASHSKIP_MANIFEST: one symbol per line.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or a symbol is unknown to this version.
    """
    symbols = dict.fromkeys(_read_text(path).split())
    try:
        return [Variant.from_symbol(symbol) for symbol in symbols]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_text(path: Path) -> str:
    """Read a file that a user named; whatever else has that name is refused, not waited for."""
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected one of text. Check the path")
    if size > LARGEST_BYTES:
        raise ValueError(
            f"{path} has {size} bytes; expected at most {LARGEST_BYTES}. Check the path"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def _count(path: Path, config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise ValueError(f"{path}: {key} is {value!r}; expected a positive integer")
    return value

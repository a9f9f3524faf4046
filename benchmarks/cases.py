"""A workload: its shape, its name, and the work that a rate divides by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SHARES = (0.0, 0.5, 0.75, 0.9)  # of negligible tiles that the data is given
_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class PrefillCase:
    """Ragged prefill. FLOPs count visible query-key pairs once for q·k and once for p·v."""

    op: ClassVar[str] = "prefill"
    graph: ClassVar[bool] = False

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    dtype: str = "bfloat16"
    shares: tuple[float, ...] = SHARES
    page_size: int = 0  # of a paged cache; 0: ragged K and V

    @property
    def visible_pairs(self) -> float:
        """Query-key pairs of one head, half of the causal square as the field counts it."""
        pairs = 0.0
        for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True):
            pairs += qo_len * (kv_len - qo_len / 2 if self.causal else kv_len)
        return pairs

    @property
    def flops(self) -> float:
        """Floating-point operations of dense attention."""
        return 2 * self.num_qo_heads * self.visible_pairs * (self.head_dim_qk + self.head_dim_vo)

    @property
    def work(self) -> float:
        """What a rate divides by time: FLOPs."""
        return self.flops

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same lengths."""
        return len({*zip(self.qo_lens, self.kv_lens, strict=True)}) == 1


@dataclass(frozen=True)
class DecodeCase:
    """One new token per request on a paged cache. Bytes count K and V once, nothing else."""

    op: ClassVar[str] = "decode"

    name: str
    batch_size: int
    kv_len: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    shares: tuple[float, ...] = SHARES
    kv_dtype: str = ""  # of the cache; empty: that of q
    graph: bool = False  # launched as a CUDA graph
    uneven: bool = False  # KV heads' shares run from 0 to twice the asked one

    @property
    def cache_dtype(self) -> str:
        """Element type of K and V."""
        return self.kv_dtype or self.dtype

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V of all requests."""
        tokens = self.batch_size * self.kv_len
        return 2.0 * tokens * self.num_kv_heads * self.head_dim * _BYTES[self.cache_dtype]

    @property
    def work(self) -> float:
        """What a rate divides by time: bytes."""
        return self.kv_bytes


Case = PrefillCase | DecodeCase


def prefill(lens: int | tuple[int, ...], causal: bool, **more: object) -> PrefillCase:
    """Make a prefill of prompts without a cache."""
    lens = (lens,) if isinstance(lens, int) else lens
    name = _prefill_name(lens, causal) + _differences(**more)
    return PrefillCase(name, lens, lens, causal, **more)  # type: ignore[arg-type]


def chunk(qo_len: int, kv_len: int, batch_size: int = 1, **more: object) -> PrefillCase:
    """Make a prefill of requests' last tokens, all before them being in the cache."""
    batch = f"{batch_size}x" if batch_size > 1 else ""
    name = f"prefill-chunk-{batch}{qo_len}-on-{kv_len}" + _differences(**more)
    lens = (qo_len,) * batch_size, (kv_len,) * batch_size
    return PrefillCase(name, *lens, True, **more)  # type: ignore[arg-type]


def decode(batch_size: int, kv_len: int, page_size: int, **more: object) -> DecodeCase:
    """Make a decode of requests of equal length."""
    name = f"decode-{batch_size}x{kv_len}-page{page_size}" + _differences(**more)
    return DecodeCase(name, batch_size, kv_len, page_size=page_size, **more)  # type: ignore[arg-type]


def _prefill_name(lens: tuple[int, ...], causal: bool) -> str:
    lengths = f"{len(lens)}x{lens[0]}" if len(set(lens)) == 1 else f"mix{len(lens)}"
    return f"prefill-{lengths}-{'causal' if causal else 'full'}"


def _differences(**more: object) -> str:
    """Name what differs from the defaults."""
    text = ""
    if "num_qo_heads" in more or "num_kv_heads" in more:
        text += f"-h{more.get('num_qo_heads', 32)}/{more.get('num_kv_heads', 8)}"
    if "head_dim" in more:
        text += f"-d{more['head_dim']}"
    if "head_dim_qk" in more:
        text += f"-d{more['head_dim_qk']}"
        if more["head_dim_vo"] != more["head_dim_qk"]:
            text += f"/{more['head_dim_vo']}"
    if "dtype" in more:
        text += f"-{more['dtype']}"
    if "kv_dtype" in more:
        text += "-fp8" if more["kv_dtype"] == "float8_e4m3fn" else f"-kv{more['kv_dtype']}"
    if "page_size" in more:  # of a prefill; every decode has one
        text += f"-page{more['page_size']}"
    if more.get("uneven"):
        text += "-uneven"
    if more.get("graph"):
        text += "-graph"
    return text

"""What is measured: workloads, and the shares of negligible tiles that their data is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SHARES = (0.0, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class PrefillCase:
    """Ragged prefill. FLOPs count visible query-key pairs once for q·k and once for p·v."""

    op: ClassVar[str] = "prefill"

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

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V of all requests, in a 16-bit type."""
        return 4.0 * self.batch_size * self.kv_len * self.num_kv_heads * self.head_dim

    @property
    def work(self) -> float:
        """What a rate divides by time: bytes."""
        return self.kv_bytes


Case = PrefillCase | DecodeCase


def prefill(lens: int | tuple[int, ...], causal: bool, **more: object) -> PrefillCase:
    """Make a prefill of prompts without a cache."""
    lens = (lens,) if isinstance(lens, int) else lens
    return PrefillCase(_prefill_name(lens, causal, **more), lens, lens, causal, **more)  # type: ignore[arg-type]


def decode(batch_size: int, kv_len: int, page_size: int, **more: object) -> DecodeCase:
    """Make a decode of requests of equal length."""
    name = f"decode-{batch_size}x{kv_len}-page{page_size}" + _differences(**more)
    return DecodeCase(name, batch_size, kv_len, page_size=page_size, **more)  # type: ignore[arg-type]


def _prefill_name(lens: tuple[int, ...], causal: bool, **more: object) -> str:
    lengths = f"{len(lens)}x{lens[0]}" if len(set(lens)) == 1 else f"mix{len(lens)}"
    return f"prefill-{lengths}-{'causal' if causal else 'full'}" + _differences(**more)


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
    return text


_ENDS = (0.0, 0.75)  # of the sweep, where the whole curve would tell no more
_DENSE = (0.0,)
# 16 requests of 1k to 32k tokens.
_MIX = (
    *(32768, 1024, 16384, 2048, 8192, 4096, 1024, 24576),
    *(2048, 12288, 4096, 1024, 20480, 3072, 6144, 1536),
)

FIRST = (
    prefill(8192, True),
    prefill(32768, True),
    decode(64, 8192, 64),
    decode(128, 16384, 64, num_qo_heads=64, num_kv_heads=8),
    prefill(8192, False),
    prefill(32768, False),
    decode(1, 131072, 64),
    decode(256, 1024, 64),
    decode(64, 8192, 16),
    decode(128, 16384, 16, num_qo_heads=64, num_kv_heads=8, shares=_ENDS),
    decode(1, 131072, 16, shares=_ENDS),
    decode(256, 1024, 16, shares=_ENDS),
    prefill((4096,) * 4, True, shares=_ENDS),
    prefill((4096,) * 4, False, shares=_ENDS),
    prefill(8192, True, head_dim_qk=64, head_dim_vo=64, shares=_ENDS),
    decode(64, 8192, 64, head_dim=64, shares=_ENDS),
)

# The tables of the prefill kernel's and the decode kernel's own bars.
PREFILL = (
    *(prefill(8192, causal, shares=_DENSE) for causal in (True, False)),
    *(prefill(32768, causal) for causal in (True, False)),
    *(prefill(131072, causal, num_qo_heads=8, num_kv_heads=1) for causal in (True, False)),
    *(prefill((4096,) * 4, causal, shares=_DENSE) for causal in (True, False)),
    *(prefill(8192, True, head_dim_qk=d, head_dim_vo=d, shares=_DENSE) for d in (64, 96, 256)),
    prefill(8192, True, head_dim_qk=192, head_dim_vo=128, shares=_DENSE),
    prefill(_MIX, True, shares=_DENSE),
    PrefillCase("prefill-chunk-512-on-131072", (512,), (131072,), True, shares=_ENDS),
)
DECODE = (
    *(
        case
        for page_size in (64, 16)
        for case in (
            decode(128, 16384, page_size, num_qo_heads=64, num_kv_heads=8),
            decode(64, 8192, page_size),
            decode(1, 131072, page_size),
            decode(256, 1024, page_size, shares=_DENSE),
        )
    ),
    decode(64, 8192, 1, shares=_DENSE),
    *(decode(64, 8192, 64, head_dim=d, shares=_DENSE) for d in (64, 256)),
    *(decode(64, 8192, 64, num_qo_heads=8 * g, shares=_DENSE) for g in (1, 3, 8, 16)),
    decode(1, 1024, 64, shares=_DENSE),
    decode(8, 2048, 64, shares=_DENSE),
)
_SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "shares": (0.0, 0.5)}
TINY = (
    prefill(512, True, head_dim_qk=64, head_dim_vo=64, **_SMALL),
    prefill((200, 300), False, head_dim_qk=64, head_dim_vo=64, **_SMALL),
    decode(2, 512, 16, head_dim=64, **_SMALL),
)

GROUPS: dict[str, tuple[Case, ...]] = {
    "first": FIRST,
    "prefill": PREFILL,
    "decode": DECODE,
    "tiny": TINY,  # proves that the harness works, on a CPU too; says nothing about speed
}

# Host time of plan() and run() is measured on these.
HOST_CASES: tuple[Case, ...] = (prefill(1024, True), decode(256, 1024, 64))
TINY_HOST_CASES = (TINY[0], TINY[2])

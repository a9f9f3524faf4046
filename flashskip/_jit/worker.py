"""One process of a warmup: compiles one stored program. Imports no torch, no numpy, no driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .compile import Program
from .entry import publish
from .error import FlashSkipError
from .kernel import build, key_of
from .render import Source


def main(path: str) -> int:
    """Compile the program of a job file that `build` wrote; return the exit status."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    fields = job["program"]
    source = fields.pop("source")
    headers = tuple((name, text) for name, text in source["headers"])
    options = tuple(fields.pop("options"))
    program = Program(source=Source(source["text"], headers), options=options, **fields)
    try:
        publish(Path(job["directory"]), key_of(program), build(program))
    except (FlashSkipError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

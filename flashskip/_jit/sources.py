"""Finds the templates and headers that ship with the package."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@lru_cache
def folder(name: str) -> Path:
    """Return ``templates`` or ``csrc``: inside the package (a wheel), else beside it (a checkout).

    Nothing else is searched: an editable install leaves stale copies in site-packages.
    """
    places = (_PACKAGE / f"_{name}", _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"the folder {name!r} of flashskip is neither at {places[0]} nor at {places[1]}; "
        "the installation is incomplete: reinstall flashskip"
    )

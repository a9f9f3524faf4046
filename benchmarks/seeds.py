"""What a seed is worth in decode: the share of tiles skipped at equal true omitted mass.

``python -m benchmarks.seeds`` draws synthetic heads, judges their tiles by seeds and as splits that
restart from nothing judge them, and writes `results/seeds.json` and
`docs/figures/seeds.svg`. Half a minute on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

TILE = 64
KEYS = 16_384
ROWS = 4  # of a KV head's group: they decide together
HEADS = 48  # of each kind
OMITTED = 0.01  # of the softmax mass, in the mean over rows
SPLITS = (1, 4, 16, 64)
TAILS = (1, 2, 4, 8, 16, 32, 48, 64)  # keys in the last tile
PASSAGE = 256  # keys that matter alike
# Scores in nats: spread over passages, sink, latest keys; number of heavy keys.
KINDS = {"sink": (2.5, 9.0, 3.0, 8), "local": (2.5, 2.0, 8.0, 8), "diffuse": (2.0, 3.0, 2.0, 64)}
SEEDS = {
    "tile 0 and the last": (1, 1),
    "tile 0 and the last 2": (1, 2),
    "tile 0 and the last 4": (1, 4),
    "the last": (0, 1),
    "the last 4": (0, 4),
}
RESULTS = Path(__file__).parent / "results" / "seeds.json"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "seeds.svg"

Array = np.ndarray[Any, np.dtype[np.float64]]


def draw_scores(kind: str, keys: int, rng: np.random.Generator) -> Array:
    """Return scores ``[HEADS, ROWS, keys]``; the rows of a head have most in common."""
    spread, sink, local, heavy = KINDS[kind]
    passages = rng.normal(0, spread, (HEADS, 1, -(-keys // PASSAGE)))
    s: Array = passages.repeat(PASSAGE, -1)[..., :keys] + rng.normal(0, 1, (HEADS, ROWS, keys))
    s[..., :4] += sink * rng.uniform(0.7, 1.2, (HEADS, ROWS, 1))
    s += local * np.exp(-np.arange(keys)[::-1] / 64)
    for head in s:
        head[:, rng.integers(0, keys, heavy)] += rng.uniform(2, 5, (ROWS, heavy))
    return s


def tiles_of(s: Array) -> tuple[Array, Array]:
    """Return maximum and share of the mass of each tile, ``[HEADS, ROWS, tiles]``."""
    pad = -s.shape[-1] % TILE
    tiles = np.pad(s, ((0, 0), (0, 0), (0, pad)), constant_values=-np.inf)
    tiles = tiles.reshape(*s.shape[:2], -1, TILE)
    mass = np.exp(tiles - tiles.max((-1, -2), keepdims=True)).sum(-1)
    return tiles.max(-1), mass / mass.sum(-1, keepdims=True)


def seeded_gaps(t: Array, first: int, last: int) -> Array:
    """Return how far each tile lies below a seed of first and last tiles, in the closest row."""
    seeds = np.concatenate([t[..., :first], t[..., t.shape[-1] - last :]], -1)
    gaps: Array = (t - seeds.max(-1, keepdims=True)).max(1)
    return gaps


def restarted_gaps(t: Array, splits: int) -> Array:
    """Return the same below the maximum of the split's earlier tiles: the first has none."""
    gaps = np.full((t.shape[0], t.shape[2]), np.inf)
    for part in np.array_split(np.arange(t.shape[-1]), splits):
        running = np.maximum.accumulate(t[..., part], -1)
        gaps[:, part[1:]] = (t[..., part[1:]] - running[..., :-1]).max(1)
    return gaps


def skip_rate(gaps: Array, mass: Array) -> float:
    """Return the share of tiles below the threshold at which OMITTED of the mass is lost."""
    low, high = -30.0, 0.0
    for _ in range(40):
        middle = (low + high) / 2
        lost = float((mass * (gaps < middle)[:, None]).sum(-1).mean())
        low, high = (middle, high) if lost < OMITTED else (low, middle)
    return float((gaps < low).mean())


def study() -> dict[str, Any]:
    """Return the skip rates by kind of head: over splits, and over the length of the last tile."""
    rng = np.random.default_rng(0)
    splits: dict[str, Any] = {}
    tails: dict[str, Any] = {}
    for kind in KINDS:
        scores = draw_scores(kind, KEYS, rng)
        t, mass = tiles_of(scores)
        seeded = skip_rate(seeded_gaps(t, 1, 1), mass)
        restarted = [skip_rate(restarted_gaps(t, n), mass) for n in SPLITS]
        splits[kind] = {"seeded": [seeded] * len(SPLITS), "restarted": restarted}
        tails[kind] = {name: [] for name in SEEDS}
        for tail in TAILS:
            middle = slice(
                KEYS // 2, KEYS // 2 + TILE - tail
            )  # dropped: the ends stay what they are
            t, mass = tiles_of(np.delete(scores, middle, -1))
            for name, (first, last) in SEEDS.items():
                tails[kind][name].append(skip_rate(seeded_gaps(t, first, last), mass))
    setting = {"keys": KEYS, "rows": ROWS, "heads": HEADS, "omitted": OMITTED}
    return {**setting, "splits": splits, "tails": tails}


def draw(results: dict[str, Any]) -> None:
    """Write the figure: one column for each kind of head."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "flashskip"
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    panels = figure.subplots(2, len(KINDS), sharey=True)
    for kind, (above, below) in zip(KINDS, panels.T, strict=True):
        for name, rates in results["splits"][kind].items():
            above.plot(SPLITS, [100 * r for r in rates], marker="o", label=name)
        above.set(title=f"{kind} heads", xlabel="splits", xscale="log", xticks=SPLITS)
        above.set_xticks(SPLITS, map(str, SPLITS), minor=False)
        for name, rates in results["tails"][kind].items():
            below.plot(TAILS, [100 * r for r in rates], marker=".", label=name)
        below.set(xlabel="keys in the last tile")
    for row in panels:
        row[0].set_ylabel(f"% skipped at {100 * results['omitted']:g} % omitted")
        row[-1].legend(fontsize=7)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    """Measure, write, print."""
    results = study()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)
    print(f"{RESULTS} and {FIGURE} written")


if __name__ == "__main__":
    main()

"""Reads a report of compute-sanitizer, and knows the accesses that are meant to race."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
DECODE_TEMPLATES = sorted((ROOT / "templates").glob("decode_*.jinja"))
API_ERROR = re.compile(r"Program hit (\S+) .* on CUDA API call to (\w+)")
PLACE = re.compile(r"\b(Write|Read) access at .*? in (\S+?):(\d+)(?=\s|$)")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?$")
RACE_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
TALK = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY")


@dataclass(frozen=True)
class Report:
    """What a run found: errors of kernels, each as its lines, and errors that API calls returned.

    `announced` is the number of both that the tool's own summary gives, None without a summary.
    """

    findings: tuple[str, ...]
    api_errors: Counter[str]
    announced: int | None
    complete: bool

    @property
    def faults(self) -> list[str]:
        """Why this report cannot be trusted; none for a report that was understood in full."""
        read = len(self.findings) + self.api_errors.total()
        if self.announced is None:
            return ["the report has no summary: the tool did not finish"]
        wrong = [] if self.complete else ["the tool did not print all it found"]
        if read != self.announced:
            wrong.append(f"{read} findings were read, the summary announces {self.announced}")
        return wrong


def parse(text: str) -> Report:
    """Read the lines that begin with ``=========``; all others are the target's own."""
    findings: list[list[str]] = []
    api_errors: Counter[str] = Counter()
    announced: int | None = None
    current: list[str] | None = None
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        body = line.removeprefix("=========").rstrip()
        if summary := SUMMARY.search(body) or RACE_SUMMARY.search(body):
            announced = int(summary[1])
        if not body or TALK.match(body.strip()):
            current = None
        elif body.startswith(("  ", " and ")):
            if current is not None:
                current.append(line)
        elif api := API_ERROR.search(body):
            api_errors[f"{api[2]}: {api[1]}"] += 1
            current = None
        else:
            current = [line]
            findings.append(current)
    complete = "were not printed" not in text
    return Report(tuple(map("\n".join, findings)), api_errors, announced, complete)


# ---- races that are none -------------------------------------------------------------------------


def _line(path: str, text: str) -> tuple[str, int]:
    """File name and number of the only line of a header that holds `text`."""
    lines = (CSRC / path).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line)
    return Path(path).name, number


def mailbox() -> dict[str, set[tuple[str, int]]]:
    """Where the warps of a prefill unit write and read ballots, without a barrier between them.

    csrc/vote.cuh: a warp casts a byte, stamped with its turn, into a word of its warpgroup; a warp
    that waits reads the word until all four stamps are of this turn. Single bytes are written by
    one warp each and by volatile stores, so a reader sees an old or a new byte and both are right;
    the word is used again four turns later, which no warp can be ahead by. Only these two lines
    and the two volatile accesses that they inline are excused, and only against each other.
    """
    return {
        "Write": {
            _line("vote.cuh", "st_shared_volatile_u8("),
            _line("ptx/shared.cuh", "st.volatile.shared.b8"),
        },
        "Read": {
            _line("vote.cuh", "ld_shared_volatile("),
            _line("ptx/shared.cuh", "ld.volatile.shared.b32"),
        },
    }


def is_the_mailbox(finding: str) -> bool:
    """Whether a race is one of ballots and nothing else: each place known, one side written."""
    known = mailbox()
    return _is_race_of(finding, lambda kind, name, line: (name, line) in known[kind])


# What several lanes of a decode warp write, one lane announces, by arriving at a barrier in shared
# memory (mbarrier) after __syncwarp; other warps read it after waiting there. Lines that write, and
# lines that read, by what they say. Arriving releases what the lane has seen, and __syncwarp let it
# see the other lanes' writes, so the reads are ordered. racecheck (2025.3 and 2026.4) counts for an
# arrival only what the arriving lane wrote itself: words that this lane wrote in the same places,
# and that the same lines read, are not reported. The same holds for what all lanes have read, one
# announces as free, and another warp then overwrites.
HANDED_ON = (
    # a loader of K to the scorer: page ids of a tile
    (
        ("shared.k_page_ids[ring.stage][page_of_lane()] = page;",),
        ("page_ids[j] = shared.k_page_ids[own_stage]",),
    ),
    # the scorer to the loaders of V: page ids; they and the weigher back: all lanes have read what
    # a free stage was for
    (
        (
            "kept.page_ids[lane + 32 * j] = page_ids[j];",
            "kept.tile = tile;",
            "kept.kv_head = segment.kv_head;",
            "kept.keys = segment.keys_in(tile);",
            "shared.kept[to.stage].tile = request;",
            "shared.ended[to.stage] = shared.segment[q_ring.stage];",
        ),
        (
            "const int tile = kept.tile, kv_head = kept.kv_head,",
            "if (kept.tile == ALL_DONE) return;",
            "if (kept.tile == SEGMENT_ENDS) {",
            "else if (kept.keys < TILE_KV) zero_tail(",
            "finish(p, shared, shared.ended[ring.stage],",
            # of which it reads a segment in these lines of headers
            "token(static_cast<int64_t>(s.request) * p.q_len_per_req),",
            "first(s.unit * ROWS),",
            "head = s.kv_head * group;",
            ": first(schedule.owner_of(s.offset)),",
            "bool is_whole() const {",
        ),
    ),
    # the scorer to the weigher: factors of columns; at the end maxima, sums and what is omitted
    (
        ("shared.columns[to[i].stage][0][column_of(c)] = factor[c];",),
        ("const float factor = factors[column_of(c)];",),
    ),
    (
        (
            "shared.columns[to][MAXIMUM][column_of(c)] = state.m[c];",
            "shared.columns[to][SUM][column_of(c)] = sum_of_warps(exchange, c);",
            "omitted_log2[column_of(c)] = log2_of_mass(omitted",
        ),
        (
            "const float m = values[MAXIMUM][row];",
            "values[SUM][row], omitted.relative_to(",
            "omitted.add(values[OMITTED_LOG2][row]);",
            "mine.values[i][row] = values[i][row];",
        ),
    ),
)


def is_handed_on(finding: str, sources: Callable[[str], str]) -> bool:
    """Whether a race is between the two sides of one of HANDED_ON and nothing else.

    `sources` gives the text of a kernel by its symbol: reports name lines of what was compiled.
    """

    def is_known(sides: tuple[tuple[str, ...], ...], kind: str, name: str, line: int) -> bool:
        if name.startswith("flashskip_decode_"):
            source = sources(Path(name).stem)
        elif (CSRC / name).is_file() and kind == "Read":
            source = (CSRC / name).read_text()
        else:
            return False
        text = source.splitlines()[line - 1]
        return any(known in text for known in sides[kind == "Read"])

    return any(_is_race_of(finding, partial(is_known, sides)) for sides in HANDED_ON)


def _is_race_of(finding: str, is_known: Callable[[str, str, int], bool]) -> bool:
    """Whether each access of a race is known, and the others differ in kind from the first."""
    places = [(m[1], Path(m[2]).name, int(m[3])) for m in PLACE.finditer(finding)]
    named = len(re.findall(r"\b(?:Write|Read) access", finding))
    first, *others = [kind for kind, _, _ in places] or [""]
    return (
        "Race reported" in finding
        and len(places) == named > 1
        and all(is_known(*place) for place in places)
        and all(kind != first for kind in others)
    )

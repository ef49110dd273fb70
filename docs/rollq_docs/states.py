"""The picture of a group's life, docs/concepts/states.svg, from the moves of the code.

`python -m rollq_docs.states` writes it, with docs/ in PYTHONPATH. A test compares it with what this makes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rollq_docs.moves import GONE, NEW, Move, moves

PICTURE = Path(__file__).parents[1] / "concepts" / "states.svg"
WIDTH, HEIGHT = 112, 38
PLACES: Mapping[str, tuple[int, int]] = {
    "pending": (120, 250),
    "running": (340, 250),
    "completed": (560, 250),
    "claimed": (770, 250),
    "archived": (970, 250),
    "filtered": (120, 90),
    "gathered": (410, 90),
    "cooling": (830, 90),
    "aborted": (340, 420),
    "expired": (560, 420),
    "failed": (770, 420),
    "leaving": (1030, 420),
}
"""Centre of each status."""
KINDS = {"on": "#334155", "again": "#1d4ed8", "end": "#b91c1c", "back": "#b45309", "reuse": "#047857"}
"""Kind of a move -> its colour."""
LEGEND = {
    "on": "towards the trainer",
    "again": "sampled again",
    "end": "kept for audit",
    "back": "the trainer goes back",
    "reuse": "trained once more",
}


class Line(NamedTuple):
    """How a move is drawn: its kind, the path of its arrow, and where its functions are written."""

    kind: str
    path: str
    x: int
    y: int


LINES: Mapping[Move, Line] = {
    (NEW, "pending"): Line("on", "M14 250 H60", 36, 290),
    (NEW, "completed"): Line("on", "M584 304 L576 273", 592, 317),
    ("pending", "running"): Line("on", "M178 250 H280", 230, 243),
    ("running", "completed"): Line("on", "M398 250 H500", 470, 267),
    ("completed", "claimed"): Line("on", "M618 250 H710", 664, 243),
    ("claimed", "archived"): Line("on", "M828 250 H910", 870, 222),
    ("archived", GONE): Line("on", "M1028 250 H1082", 1056, 276),
    ("archived", "leaving"): Line("on", "M1008 271 L1026 397", 1050, 340),
    ("leaving", GONE): Line("on", "M1030 441 V482", 1030, 498),
    ("failed", "leaving"): Line("end", "M828 420 H970", 896, 413),
    ("filtered", "leaving"): Line("end", "M120 69 C200 24 960 20 1040 50 C1090 80 1090 280 1052 397", 600, 36),
    ("running", "gathered"): Line("on", "M348 229 L396 113", 384, 168),
    ("gathered", "completed"): Line("on", "M454 111 L540 227", 560, 132),
    ("running", "pending"): Line("again", "M306 229 C276 190 190 190 158 226", 232, 190),
    ("pending", "aborted"): Line("again", "M136 271 C160 340 220 400 280 412", 172, 372),
    ("running", "aborted"): Line("again", "M340 271 V397", 374, 300),
    ("running", "expired"): Line("again", "M372 271 L512 397", 432, 345),
    ("gathered", "expired"): Line("again", "M418 111 C436 220 470 320 530 397", 468, 212),
    ("completed", "expired"): Line("again", "M560 271 V397", 588, 340),
    ("aborted", "expired"): Line("again", "M398 420 H500", 448, 413),
    ("aborted", "pending"): Line("again", "M282 432 C190 430 120 380 112 273", 138, 402),
    ("expired", "pending"): Line("again", "M540 441 C480 520 108 520 104 273", 300, 495),
    ("running", "filtered"): Line("end", "M316 229 L166 113", 240, 152),
    ("gathered", "filtered"): Line("end", "M352 90 H180", 266, 83),
    ("completed", "failed"): Line("end", "M590 271 C600 330 680 370 724 399", 636, 362),
    ("completed", "pending"): Line("again", "M526 229 C470 140 210 120 136 227", 330, 152),
    ("filtered", "pending"): Line("again", "M120 109 V227", 92, 170),
    ("failed", "pending"): Line("again", "M760 441 C740 530 640 553 560 553 H112 C84 553 86 400 96 273", 560, 558),
    ("running", "failed"): Line("end", "M388 271 C440 480 640 500 728 443", 640, 500),
    ("claimed", "failed"): Line("end", "M770 271 V397", 798, 340),
    ("claimed", "completed"): Line("back", "M734 271 C700 300 640 300 604 273", 668, 308),
    ("archived", "claimed"): Line("back", "M940 271 C910 300 850 300 808 273", 872, 308),
    ("archived", "completed"): Line("back", "M960 229 C900 130 640 130 584 226", 720, 152),
    ("claimed", "pending"): Line("back", "M822 271 C860 320 862 540 700 540 H104 C70 540 72 400 84 273", 460, 534),
    ("archived", "pending"): Line("back", "M980 271 C980 480 940 566 760 566 H90 C50 566 52 400 72 273", 460, 584),
    ("archived", "cooling"): Line("reuse", "M986 229 C986 150 950 100 890 92", 968, 130),
    ("cooling", "completed"): Line("reuse", "M772 90 C680 90 600 130 566 226", 650, 100),
}
"""Moves between statuses, into one, and the last one out. Other ways out are a cross at the status."""


def picture() -> str:
    """The picture, as SVG. Raises `KeyError` for a move that has no line."""
    lines = [_line(move, LINES[move], names) for move, names in moves().items() if not _is_drop(move)]
    marks = [_drop(status, names) for (status, end), names in moves().items() if _is_drop((status, end))]
    return "\n".join([*_head(), *lines, *map(_status, PLACES), *marks, *_legend(), "</svg>"]) + "\n"


def _is_drop(move: Move) -> bool:
    return move[1] == GONE and move not in LINES


def _head() -> Iterator[str]:
    yield (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1096 640" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13" role="img" aria-labelledby="title">'
    )
    yield '<title id="title">The statuses of a group, and the functions that move it from one to another</title>'
    yield "<defs>"
    for kind, colour in KINDS.items():
        yield (
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield '<rect x="1" y="1" width="1094" height="638" rx="14" fill="#ffffff" stroke="#e2e8f0"/>'


def _line(move: Move, line: Line, names: tuple[str, ...]) -> str:
    colour, text = KINDS[line.kind], ", ".join(names)
    if move[0] == NEW:
        words = "".join(_text(line.x, line.y + 15 * row, name, colour) for row, name in enumerate(names))
    else:
        words = _text(line.x, line.y, text, colour)
    arrow = f'<path d="{line.path}" fill="none" stroke="{colour}" stroke-width="1.4" marker-end="url(#{line.kind})"/>'
    return f'<g data-from="{move[0]}" data-to="{move[1]}">{arrow}{words}</g>'


def _text(x: int, y: int, text: str, colour: str) -> str:
    halo = 'paint-order="stroke" stroke="#ffffff" stroke-width="4"'
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}" {halo}>{text}</text>'


def _status(status: str) -> str:
    x, y = PLACES[status]
    box = f'<rect x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" rx="7" '
    name = f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-size="15" font-weight="bold" '
    return f'{box}fill="#f1f5f9" stroke="#64748b"/>{name}fill="#0f172a">{status}</text>'


def _drop(status: str, names: tuple[str, ...]) -> str:
    x, y = PLACES[status][0] + WIDTH // 2 - 9, PLACES[status][1] - HEIGHT // 2 + 9
    cross = f'<path d="M{x - 4} {y - 4} l8 8 m0 -8 l-8 8" stroke="#b91c1c" stroke-width="1.6"/>'
    return f'<g data-from="{status}" data-to="{GONE}"><title>dropped by {", ".join(names)}</title>{cross}</g>'


def _legend() -> Iterator[str]:
    x = 30
    for kind, text in LEGEND.items():
        yield f'<path d="M{x} 614 h26" stroke="{KINDS[kind]}" stroke-width="2" marker-end="url(#{kind})"/>'
        yield f'<text x="{x + 34}" y="618" fill="#334155">{text}</text>'
        x += 60 + 6 * len(text)
    yield f'<path d="M{x} 609 l9 9 m0 -9 l-9 9" stroke="#b91c1c" stroke-width="1.6"/>'
    yield f'<text x="{x + 17}" y="618" fill="#334155">may be dropped, and is counted</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")

"""The picture of what is trained over the gateway, docs/guide/segments.svg.

`python -m rollq_docs.segments` writes it, with docs/ in PYTHONPATH. A test plays each scene in a session of the
gateway, and compares the segments with those that are drawn.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).parents[1] / "guide" / "segments.svg"
WIDTH, LEFT, HEIGHT, GAP, SCENE_GAP = 1000, 300, 34, 8, 24
PROMPT, TRAINED, MASKED = "prompt", "trained", "masked"
COLOURS = {PROMPT: ("#e2e8f0", "#475569"), TRAINED: ("#dbeafe", "#1e3a8a"), MASKED: ("#ffffff", "#64748b")}
"""Kind of a block -> its colour, and the colour of its words."""
LEGEND = {PROMPT: "prompt of a segment", TRAINED: "written by the model: trained", MASKED: "between turns: masked"}


class Block(NamedTuple):
    """Tokens of a segment: their kind, and what they are."""

    kind: str
    words: str


class Scene(NamedTuple):
    """A program at work, and the segments that it makes."""

    title: str
    segments: Sequence[Sequence[Block]]


SCENES: Sequence[Scene] = (
    Scene(
        "a tool call, and its result",
        (
            (
                Block(PROMPT, "question"),
                Block(TRAINED, "call of a tool"),
                Block(MASKED, "result"),
                Block(TRAINED, "answer"),
            ),
        ),
    ),
    Scene(
        "the template drops earlier thoughts",
        (
            (Block(PROMPT, "question"), Block(TRAINED, "thoughts, answer")),
            (Block(PROMPT, "question, answer, next question"), Block(TRAINED, "answer")),
        ),
    ),
    Scene(
        "two calls continue one answer",
        (
            (Block(PROMPT, "question"), Block(TRAINED, "plan"), Block(MASKED, "part 1"), Block(TRAINED, "answer 1")),
            (Block(PROMPT, "question, plan, part 2"), Block(TRAINED, "answer 2")),
        ),
    ),
    Scene(
        "a subagent, which gets a task",
        (
            (Block(PROMPT, "question"), Block(TRAINED, "call"), Block(MASKED, "result"), Block(TRAINED, "answer")),
            (Block(PROMPT, "task of the subagent"), Block(TRAINED, "result")),
        ),
    ),
    Scene(
        "the history is compacted",
        (
            (
                Block(PROMPT, "question"),
                Block(TRAINED, "answer"),
                Block(MASKED, "summarise"),
                Block(TRAINED, "summary"),
            ),
            (Block(PROMPT, "summary, next question"), Block(TRAINED, "answer")),
        ),
    ),
)


def svg() -> str:
    """The picture."""
    return "\n".join([*_lines(), ""])


def _lines() -> Iterator[str]:
    rows = sum(len(scene.segments) for scene in SCENES)
    height = 60 + rows * (HEIGHT + GAP) + len(SCENES) * SCENE_GAP
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, '
        'sans-serif" font-size="14" role="img" aria-labelledby="title">'
    )
    yield '<title id="title">What a program does, and the segments of tokens that its sample gets</title>'
    yield f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="14" fill="#ffffff" stroke="#e2e8f0"/>'
    x = LEFT
    for kind, words in LEGEND.items():
        yield from _block(x, 18, 22, Block(kind, ""))
        yield f'<text x="{x + 30}" y="34" fill="#0f172a">{words}</text>'
        x += 60 + 7 * len(words)
    y = 60
    for scene in SCENES:
        middle = y + (len(scene.segments) * (HEIGHT + GAP) - GAP) / 2 + 5
        yield f'<text x="20" y="{middle:g}" fill="#0f172a">{scene.title}</text>'
        for segment in scene.segments:
            x = LEFT
            for block in segment:
                width = 24 + 7 * len(block.words)
                yield from _block(x, y, width, block)
                x += width + 3
            y += HEIGHT + GAP
        y += SCENE_GAP
    yield "</svg>"


def _block(x: int, y: int, width: int, block: Block) -> Iterator[str]:
    fill, ink = COLOURS[block.kind]
    dashes = ' stroke-dasharray="4 3"' if block.kind == MASKED else ""
    height = HEIGHT if block.words else 22
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{ink}"{dashes}/>'
    if block.words:
        yield f'<text x="{x + width / 2:g}" y="{y + 22}" text-anchor="middle" fill="{ink}">{block.words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), "utf-8")

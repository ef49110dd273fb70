"""Tables of text for a terminal."""

from collections.abc import Collection, Iterable, Mapping, Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Rows as lines, each column as wide as its widest cell; columns in `left` are left-aligned, and others are
    right-aligned."""
    columns = [
        [cell.ljust(width) if index in left else cell.rjust(width) for cell in cells]
        for index, cells in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, cells))]
    ]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def fitting(widths: Mapping[str, int], spare: Iterable[str], room: int) -> list[str]:
    """The columns that fit into `room`. Spare columns are left out, in their order, until the others fit."""
    kept = dict(widths)
    for column in spare:
        if sum(kept.values()) <= room:
            break
        kept.pop(column, None)
    return list(kept)

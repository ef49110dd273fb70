"""All pages: their links lead somewhere, their commands and make targets exist, their blocks say how they are run."""

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest

from rollq.buffer.values.rollouts import Status
from rollq.cli.main import COMMANDS, main
from support.documented_commands import ROOT, blocks

DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "compose").rglob("*.md")]
)
MARKS = {"", "terminals", "terminal", "file", "redis-cli", "elsewhere"}
SHELL = {"&", "||", "|", ">"}
"""Words of the shell that end a command."""
RUN = [
    ROOT / "README.md",
    GUIDE / "first-run.md",
    GUIDE / "machines.md",
    GUIDE / "watching.md",
    GUIDE / "containers.md",
    GUIDE / "operations.md",
    GUIDE / "when-it-breaks.md",
    GUIDE / "security.md",
    *(DOCS / "concepts").glob("*.md"),
]
"""The pages that `blocks` must understand completely."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `rollq` command in the page's shell blocks."""
    for block in blocks(page):
        if block.language in ("bash", "sh"):
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "rollq" in words:
                    yield list(takewhile(lambda word: word not in SHELL, words[words.index("rollq") + 1 :]))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_rollq_command_has_the_arguments_that_it_takes(page: Path) -> None:
    for name, *arguments in commands(page):
        assert name in COMMANDS
        command = main.get_command(click.Context(main), name)
        assert command is not None
        try:
            context = command.make_context(name, arguments)
            if isinstance(command, click.Group):
                part, *rest = arguments
                inner = command.get_command(context, part)
                assert inner is not None
                inner.make_context(part, rest, parent=context)
        except click.BadParameter as error:
            if "does not exist" not in error.message:  # a folder of the reader
                raise


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_every_block_says_how_it_is_run(page: Path) -> None:
    found = blocks(page)
    assert len(found) == page.read_text("utf-8").count("\n```") / 2
    assert {block.mark for block in found} <= MARKS
    assert {block.language for block in found} <= {"bash", "python", "toml", "text"}


def test_the_make_targets_on_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    texts = [page.read_text("utf-8") for page in PAGES]
    named = {target for text in texts for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named
    assert named - {"help"} <= targets


def words_of(pages: Iterable[Path]) -> int:
    """The number of words on pages, blocks of code included: what white space separates, with a letter or a digit."""
    return sum(bool(re.search("[A-Za-z0-9]", word)) for page in pages for word in page.read_text("utf-8").split())


def test_there_is_not_too_much_to_read() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
    assert words_of(GUIDE.glob("*.md")) <= 30_000, "cut as much elsewhere as a page needs"
    assert len(COMMANDS) <= 26


def test_the_guide_lists_all_its_pages() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (GUIDE / "README.md").read_text("utf-8")))
    assert listed == {page.name for page in GUIDE.glob("*.md")} - {"README.md"}


def test_the_architecture_page_has_every_status_and_every_room() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    statuses = text.split("## Life of a group")[1].split("##")[0]
    assert [status.value for status in Status if not re.search(rf"^\|[\w, ]*\b{status.value}\b", statuses, re.M)] == []
    folders = {path.parent for path in ROOT.glob("*/rollq/**/__init__.py")}
    rooms = {"/".join(folder.relative_to(ROOT).parts[2:]) for folder in folders}
    assert [room for room in sorted(rooms) if f"`{room}`" not in text] == []


def test_the_architecture_page_names_functions_that_exist() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    table = text.split("## Life of a group")[1].split("##")[0]
    functions = {path.stem for path in (ROOT / "buffer").rglob("*.lua")}
    assert set(re.findall(r"`(\w+)`", table)) <= functions

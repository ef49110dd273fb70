"""The documentation site: it builds, it has every page and every name, and loads nothing from other hosts."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from rollq.buffer.archive.schema import schema
from rollq.buffer.errors import RollqError
from rollq.buffer.store import keys
from rollq.cli.main import COMMANDS
from rollq.cli.settings.reference import COMMON, RARE_OF_TASKS, engine_reference, reference
from rollq.cli.settings.task_tables import MAIN
from rollq.monitor.metrics.catalogue import CALLS, METRICS, UP
from rollq_docs import guide, links
from rollq_docs import reference as site_reference
from rollq_docs.markdown import code
from rollq_docs.python_pages import PACKAGES
from support.documented_commands import ROOT
from test_public_names import PUBLIC

DOCS = ROOT / "docs"
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]*?\s(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
SHAPES = {"li": "list_item_open", "table": "table_open", "h2": "heading_open"}
"""Tags that both readings of a page must have equally often -> their tokens in markdown-it."""


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    """The pages of the reference, by name; to make them takes seconds."""
    return {name: text for name, _, text in site_reference.pages()}


def all_errors(kind: type[Exception]) -> set[str]:
    return {kind.__name__}.union(*map(all_errors, kind.__subclasses__()))


def counted(page: Path) -> dict[str, int]:
    """How many items, tables and headings GitHub sees in a page."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
    return {
        tag: sum(token.type == kind and (tag != "h2" or token.tag == tag) for token in tokens)
        for tag, kind in SHAPES.items()
    }


def shown(html: str) -> dict[str, int]:
    """The same of a page of the site."""
    article = html.split("<article", 1)[1].split("</article>", 1)[0]
    return {tag: len(re.findall(rf"<{tag}[ >]", article)) for tag in SHAPES}


@pytest.mark.long
def test_the_site_builds_without_a_warning_loads_nothing_from_elsewhere_and_shows_pages_as_github_does(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {name: found for name, html in pages.items() if (found := ELSEWHERE.findall(html))} == {}
    sources = {path: path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    built = {path: re.sub(r"(README)?\.md$", lambda end: "index.html" if end[1] else ".html", name)
             for path, name in sources.items()}  # fmt: skip
    assert {sources[path]: shown(pages[name]) for path, name in built.items()} == {
        name: counted(path) for path, name in sources.items()
    }


def test_every_page_of_the_guide_has_a_place() -> None:
    placed = [page for pages in guide.groups((DOCS / guide.INDEX).read_text("utf-8")).values() for page in pages]
    assert sorted(path for page in placed for path in page.values()) == sorted(
        f"guide/{path.name}" for path in (DOCS / "guide").glob("*.md") if path.name != "README.md"
    )


def test_the_packages_are_those_with_public_names(pages: Mapping[str, str]) -> None:
    assert set(PACKAGES) == set(PUBLIC)
    for package, names in PUBLIC.items():
        page = pages[f"reference/python/{package.partition('.')[2]}.md"]
        assert [name for name in names if f"::: {package}.{name}\n" not in page and f"## {name}\n" not in page] == []


def test_every_setting_of_the_example_has_a_row(pages: Mapping[str, str]) -> None:
    example = (ROOT / "examples" / "rollq.toml").read_text("utf-8")
    named = set(re.findall(r"^#?([a-z]\w*) = ", example, re.MULTILINE)) - {"step"}
    page = pages["reference/settings.md"]
    assert [name for name in sorted(named) if f"| {code(name)} |" not in page] == []
    assert set(re.findall(r"^##+ \[([^\]]+)\]", page, re.MULTILINE)) >= {
        name.replace(".sum", ".NAME").replace(".held_out", ".NAME")
        for name in re.findall(r"^\[([a-z_.]+)\]", example, re.MULTILINE)
        if not name.endswith("options")
    }


def test_a_page_that_a_setting_names_is_a_link(pages: Mapping[str, str]) -> None:
    page = pages["reference/settings.md"]
    assert "see [guide/security.md](../guide/security.md)" in page
    assert "docs/guide/" not in page


def test_the_settings_that_one_sees_without_unfolding_are_few(pages: Mapping[str, str]) -> None:
    settings = [setting for table in [*reference(), *engine_reference()] for setting in table.settings]
    common = [setting for setting in settings if setting.is_common]
    assert len(common) <= 120
    listed = sum(len(keys.split()) for keys in COMMON.values()) + len(set(MAIN) - RARE_OF_TASKS)
    assert listed == len(common), "all of them exist"
    page = pages["reference/settings.md"]
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    assert page.count("\n| <code>") == len(settings)
    assert shown.count("\n| <code>") == len(common)


def test_every_command_metric_and_error_has_a_place(pages: Mapping[str, str]) -> None:
    commands = re.findall(r"^## rollq (\w+)", pages["reference/command-line.md"], re.MULTILINE)
    assert list(dict.fromkeys(commands)) == list(COMMANDS)
    rows = [
        f"| {code(one.name)} | {'counter' if one.is_counter else 'gauge'} | {', '.join(one.labels) or '-'} |"
        for one in (UP, CALLS, *METRICS)
    ]
    assert [row for row in rows if row not in pages["reference/metrics.md"]] == []
    ours = {name for name in all_errors(RollqError) if name != "RollqError" and not name.startswith("_")}
    assert [name for name in sorted(ours) if f"`{name}` |" not in pages["reference/errors.md"]] == []


def test_every_column_of_the_archive_has_its_type(pages: Mapping[str, str]) -> None:
    text = pages["reference/archive.md"]
    assert f"| {code('reward')} | {code('double')} | the judge's reward, after penalties |" in text
    assert [name for name in schema().names if f"| {code(name)} |" not in text] == []


def test_every_row_of_the_table_of_keys_is_understood(pages: Mapping[str, str]) -> None:
    text = pages["reference/redis-keys.md"]
    assert (
        f"| {code('rollq:{run:task}:suspects')} | zset | pending groups that workers died with | functions | run |"
        in text
    )
    assert text.count("\n| <code>rollq:") == (keys.__doc__ or "").count("\nrollq:{run")


@pytest.mark.parametrize(
    ("page", "origin", "text", "rewritten"),
    [
        ("index.md", "README.md", "[a](docs/guide/prompts.md#order)", "[a](guide/prompts.md#order)"),
        ("guide/a.md", "docs/guide/a.md", "[a](../../README.md#fits-with)", "[a](../index.md#fits-with)"),
        ("guide/a.md", "docs/guide/a.md", "[a](../../README.md#start)", "[a](../quick-start.md#start)"),
        ("guide/a.md", "docs/guide/a.md", "[a](../../examples/rollq.toml)", "[a](../source/examples/rollq.toml.md)"),
        ("guide/a.md", "docs/guide/a.md", "[a](#b) [c](https://d.e/f.md)", "[a](#b) [c](https://d.e/f.md)"),
        ("changelog.md", "CHANGELOG.md", "`x[0](y.md)`", "`x[0](y.md)`"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, origin: str, text: str, rewritten: str) -> None:
    assert links.rewritten(text, origin, page) == rewritten

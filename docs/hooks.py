"""Hooks of MkDocs: what the site has beside the pages in docs/. See mkdocs.yml."""

from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rollq_docs import guide, links, reference
from rollq_docs.markdown import sections

ROOT = Path(__file__).parent.parent
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of pages that a search does not find."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the guide and the reference to the navigation."""
    assert config.nav is not None
    guide.add_guide(config.nav, ROOT / "docs")
    guide.part(config.nav, "Reference").extend({title: path} for path, title, _ in _reference())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    readme = sections((ROOT / "README.md").read_text("utf-8"))
    _add(files, config, "index.md", "".join(readme.pop(name) for name in links.HOME))
    _add(files, config, links.QUICK_START, "".join(["# Quick start\n\n", *readme.values()]))
    for path, _, text in _reference():
        _add(files, config, path, text)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        _add(files, config, links.page_of(name), (ROOT / name).read_text("utf-8"))
    _add_sources(files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository, and rank the page in searches."""
    page.meta.setdefault("search", {}).setdefault("boost", _boost(page.file.src_uri))
    return links.rewritten(markdown, _origin(page.file.src_uri), page.file.src_uri)


def _boost(page: str) -> float:
    """How much a page counts in a search: guides first, generated reference last."""
    folder = page.partition("/")[0]
    return {"guide": 4.0, "concepts": 2.0, "migration": 2.0, "reference": 0.25}.get(
        folder, 0.5 if "/" not in page else 1.0
    )


@cache
def _reference() -> tuple[tuple[str, str, str], ...]:
    return tuple(reference.pages())


def _origin(page: str) -> str:
    """The file of the repository that a page shows, or where it would be."""
    if page == links.QUICK_START:
        return "README.md"
    if page.startswith("source/"):
        path = page.removeprefix("source/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return {new: old for old, new in links.MOVED.items()}.get(page, f"docs/{page}")


def _add_sources(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file outside of docs/ that a page links to."""
    new = [file for file in files if file.src_uri.endswith(".md")]
    while new:
        file = new.pop()
        for path in links.linked(file.content_string, _origin(file.src_uri)):
            page = links.page_of(path)
            if page.startswith("source/") and page not in files.src_uris and (ROOT / path).is_file():
                text = (ROOT / path).read_text("utf-8")
                language = Path(path).suffix.removeprefix(".") or "text"
                shown = text if language == "md" else f"# {path}\n\n`````{language}\n{text}\n`````\n"
                new.append(_add(files, config, page, HIDDEN + shown))


def _add(files: Files, config: MkDocsConfig, page: str, text: str) -> File:
    file = File.generated(config, page, content=text)
    files.append(file)
    return file

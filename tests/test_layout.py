"""The architecture, checked on the source itself: who may import whom, and what nobody may use."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "buffer": {"buffer"},
    "producer": {"producer", "buffer"},
    "workers": {"workers", "buffer"},
    "consumer": {"consumer", "buffer"},
    "monitor": {"monitor", "producer", "workers", "consumer", "buffer"},
    "environments": {"environments", "producer", "workers", "buffer"},
    "cli": {"cli", "environments", "monitor", "producer", "workers", "consumer", "buffer"},
    "integrations": {"integrations", "consumer", "buffer"},
}

READING_ORDER = {
    "workers": ("run", "groups", "gateway", "agents", "judging", "weight_follower", "engines", "user_code", "http"),
    "consumer": ("trainer", "objective", "consumer", "claims", "weights", "losses", "batches"),
    "buffer": (
        "buffer", "snapshots", "query", "weights", "calls", "payloads", "store", "wire", "rules", "values", "common",
        "errors",
    ),
    "monitor": ("dashboard", "metrics", "changes", "report", "status", "groups", "text"),
    "cli": ("top", "commands", "settings"),
}  # fmt: skip
"""Top-level modules of a package in their reading order; each may import only from modules after it."""
LARGEST = {"buffer": (20, 10), "consumer": (13, 7), "workers": (19, 6), "monitor": (8, 4), "cli": (16, 4)}
"""The most top-level modules and layers in a package. A module imports only from lower layers."""

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
}

SOURCES = sorted(path for part in MAY_IMPORT for path in (ROOT / part / "rollq").rglob("*.py"))
SHIPPED = SOURCES + sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """A source as these checks see it. `modules`: all that it imports; `relative`: lines with a relative import;
    `calls`: the functions that it calls by a name of at most two parts."""

    docstring: str | None
    modules: frozenset[str]
    relative: tuple[int, ...]
    calls: frozenset[str]


def facts_of(source: str) -> Facts:
    """Read a source, once for all checks."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    return Facts(
        ast.get_docstring(tree),
        frozenset(imported_modules(nodes)),
        tuple(node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.level),
        frozenset(called_names(nodes)),
    )


@cache
def facts() -> Mapping[Path, Facts]:
    """Every shipped source."""
    return {path: facts_of(path.read_text("utf-8")) for path in SHIPPED}


def imported_modules(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
                yield f"{module}.{name}"


def module_name(path: Path) -> str:
    """The dotted name of a source file: `rollq.buffer.store.keys`."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def project_imports() -> dict[str, set[str]]:
    """Every module -> the modules of rollq that it imports, anywhere in it; `__init__` files only export."""
    sources = {module_name(path): path for path in SOURCES if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for name, path in sources.items():
        graph[name] = {module for module in facts()[path].modules if module in sources} - {name}
    return graph


def top_level_imports(part: str) -> dict[str, set[str]]:
    """Top-level module of a package (a folder or a file) -> the other top-level modules that it imports."""
    graph: dict[str, set[str]] = {}
    for name, imported in project_imports().items():
        if name.split(".")[1] == part:
            module = name.split(".")[2]
            inside = {other.split(".")[2] for other in imported if other.split(".")[1] == part}
            graph[module] = graph.get(module, set()) | (inside - {module})
    return graph


def layers(graph: dict[str, set[str]]) -> list[set[str]]:
    """The nodes of `graph` by layer: each imports only from lower layers. Raises `CycleError` for a cycle."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        found.append(set(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def wrong_imports(part: str, source: Facts) -> set[str]:
    """The parts of rollq that a module of `part` imports against the rules."""
    modules = (module.split(".") for module in source.modules)
    return {names[1] for names in modules if names[0] == "rollq" and len(names) > 1} - MAY_IMPORT[part]


def unsafe_uses(source: Facts) -> set[str]:
    """Modules and calls in a module that would run what they read."""
    return {module for module in source.modules if module.split(".")[0] in UNSAFE_MODULES} | (
        source.calls & UNSAFE_CALLS
    )


def test_every_part_of_rollq_is_known_here() -> None:
    assert {path.parent.name for path in ROOT.glob("*/rollq")} == set(MAY_IMPORT)


def test_imports_run_one_way() -> None:
    wrong = {path: wrong_imports(path.relative_to(ROOT).parts[0], facts()[path]) for path in SOURCES}
    assert {name_of(path): parts for path, parts in wrong.items() if parts} == {}


def test_no_import_is_relative() -> None:
    """A relative import hides who is imported."""
    assert {name_of(path): source.relative for path, source in facts().items() if source.relative} == {}


def test_no_modules_import_each_other() -> None:
    assert layers(project_imports())


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_top_level_modules_do_not_import_each_other(part: str) -> None:
    assert layers(top_level_imports(part))


@pytest.mark.parametrize("part", LARGEST)
def test_a_package_is_small_enough_to_survey(part: str) -> None:
    modules = top_level_imports(part)
    most_modules, most_layers = LARGEST[part]
    assert len(modules) <= most_modules
    assert len(layers(modules)) <= most_layers


@pytest.mark.parametrize("part", READING_ORDER)
def test_top_level_modules_import_only_from_modules_that_are_read_after_them(part: str) -> None:
    graph = top_level_imports(part)
    order = READING_ORDER[part]
    assert set(order) <= set(graph)
    upward = [
        (module, above) for place, module in enumerate(order) for above in order[:place] if above in graph[module]
    ]
    assert upward == []


def test_nothing_that_is_read_can_run() -> None:
    assert {name_of(path): uses for path, source in facts().items() if (uses := unsafe_uses(source))} == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path, source in facts().items() if not source.docstring] == []


def test_rollq_stays_a_namespace_shared_by_its_parts() -> None:
    assert [name_of(path) for path in ROOT.glob("*/rollq/__init__.py")] == []


def test_every_package_is_marked_and_documented() -> None:
    folders = {path.parent for path in SOURCES}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_these_checks_see_what_they_look_for() -> None:
    assert wrong_imports("workers", facts_of("from rollq.producer.sampler import Sampler")) == {"producer"}
    assert wrong_imports("buffer", facts_of("from rollq import cli")) == {"cli"}
    assert wrong_imports("cli", facts_of("import rollq.buffer.store.keys")) == set()
    assert facts_of("from os import path\nfrom . import keys").relative == (2,)
    with pytest.raises(CycleError):
        layers({"batch": {"micro_batch"}, "micro_batch": {"packing", "batch"}})
    assert unsafe_uses(facts_of("import pickle as p\ntorch.load(f)\nmodel.eval()")) == {"pickle", "torch.load"}

"""Families found by their chat templates: those of TRL, and those of `tests/data/templates`."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from rollq.workers.agents.chat_formats import BUILT_IN as FORMATS
from rollq.workers.agents.chat_formats import format_of
from rollq.workers.agents.formats.families import FAMILIES, family_of
from rollq.workers.tokenizers.byte import ByteTokenizer
from support.chat_engine import PLAIN, chat_tokenizer
from support.chat_families import BUILT_IN, TEMPLATES, Family, family_tokenizer, template_of

OF_TRL = {
    "deepseek_v3": {"deepseek_r1_distill", "deepseekv3"},
    "glm45": {"glm4moe"},
    "harmony": {"gptoss"},
    "hermes": {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"},
    "llama3_json": {"llama3_1", "llama3_2"},
    "qwen3_coder": {
        "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink",
        "qwen3_5_think", "qwen3_6", "qwen3_8",
    },
}  # fmt: skip
"""Format -> its templates in TRL. All others have no tools, or a form that rollq does not parse."""


def templates_of_trl() -> dict[str, str]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text() for path in folder.glob("*.jinja") if not path.stem.endswith("_training")}


def test_every_template_of_trl_has_the_right_family_or_none() -> None:
    found: dict[str | None, set[str]] = {}
    for name, template in templates_of_trl().items():
        found.setdefault(family_of(template), set()).add(name)
    unknown = found.pop(None)
    assert found == OF_TRL
    assert {"cohere2", "gemma4", "lfm2", "llama3", "phi3_5", "smolvlm"} <= unknown


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_template_has_marks_of_one_family(name: str) -> None:
    template = template_of(f"data:{name}")
    assert [family for family, marks in FAMILIES.items() if marks.match(template)] == [family_of(template)]


@pytest.mark.parametrize("family", BUILT_IN.values(), ids=BUILT_IN)
def test_auto_chooses_the_parser_that_the_family_needs(family: Family, tmp_path: Path) -> None:
    found = format_of(family_tokenizer(tmp_path, family))
    if family.parsers != {"tool_parser": "auto"}:
        assert found.parser is FORMATS[family.parsers.get("tool_parser", "hermes")].parser


def test_a_format_is_named_for_every_family() -> None:
    assert FAMILIES.keys() <= FORMATS.keys()
    assert {FORMATS[name].parser for name in FAMILIES} == {each.parser for each in FORMATS.values()}


def test_a_tokenizer_gives_its_template_for_tools(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    assert tokenizer.chat_template == PLAIN
    tokenizer.backend.chat_template = {"default": PLAIN, "tool_use": "[TOOL_CALLS]"}
    assert tokenizer.chat_template == "[TOOL_CALLS]"
    tokenizer.backend.chat_template = None
    assert tokenizer.chat_template is ByteTokenizer().chat_template is None

"""Recognises a chat template's model family by strings that only this family's templates contain. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Marks:
    """Strings that a family's templates contain, and strings that they lack."""

    present: tuple[str, ...]
    absent: tuple[str, ...] = ()

    def match(self, template: str) -> bool:
        """Whether the template belongs to the family."""
        return all(mark in template for mark in self.present) and not any(mark in template for mark in self.absent)


DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")
FAMILIES: Final[Mapping[str, Marks]] = {
    "harmony": Marks(("<|start|>", "<|channel|>", "<|message|>")),
    "mistral": Marks(("[TOOL_CALLS]", "[INST]")),
    "deepseek_v3": Marks((*DEEPSEEK, "```json"), ("<｜DSML｜",)),
    "deepseek_v31": Marks(DEEPSEEK, ("```json", "<｜DSML｜")),
    "glm45": Marks(("<tool_call>", "</arg_key>", "</arg_value>")),
    "qwen3_coder": Marks(("<tool_call>", "<function=", "<parameter=")),
    "hermes": Marks(("<tool_call>", "name", "arguments"), ("</arg_key>", "<function=", "<invoke")),
    "llama3_json": Marks(("<|start_header_id|>", '"parameters": ', "ipython")),
}


def family_of(template: str) -> str | None:
    """The format name of the template's family; None for an unknown family."""
    return next((name for name, marks in FAMILIES.items() if marks.match(template)), None)

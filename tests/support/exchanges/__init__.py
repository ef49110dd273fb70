"""Turns as models of each family write them, and what they mean.

After the examples in chat templates and model cards, and outputs that the tests of vLLM's parsers quote.
"""

from collections.abc import Mapping

from support.exchanges.common import MALFORMED, TOOLS, Exchange
from support.exchanges.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from support.exchanges.glm import GLM
from support.exchanges.harmony import HARMONY
from support.exchanges.hermes import HERMES
from support.exchanges.llama3 import LLAMA3
from support.exchanges.mistral import MISTRAL
from support.exchanges.qwen3_xml import QWEN3_XML

__all__ = ["EXCHANGES", "MALFORMED", "TOOLS", "Exchange"]

EXCHANGES: Mapping[str, Mapping[str, Exchange]] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "glm45": GLM,
    "glm47": GLM,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "harmony": HARMONY,
    "openai": HARMONY,
}
"""Name of a format -> its exchanges, by what they show."""

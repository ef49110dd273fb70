"""The chat templates of 130 models, as Xinference has them, and the format that `auto` chooses for each."""

import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from rollq.workers.agents.formats.families import family_of

FOLDER = Path(sys.prefix) / "templates" / "xinference" / "model" / "llm" / "models"
KNOWN: Mapping[str, set[str]] = {
    "deepseek_v3": {
        "deepseek-prover-v2", "deepseek-r1", "deepseek-r1-0528", "deepseek-r1-0528-qwen3", "deepseek-r1-distill-llama",
        "deepseek-r1-distill-qwen", "deepseek-v2.5", "deepseek-v3-0324", "qwenLong-l1", "skywork-or1",
        "skywork-or1-preview",
    },
    "deepseek_v31": {"DeepSeek-V3.2", "DeepSeek-V3.2-Exp", "Deepseek-V3.1"},
    "glm45": {
        "GLM-4.6", "GLM-4.7", "GLM-4.7-Flash", "Ling-3.0-flash", "Ling-3.0-tiny", "glm-4.5", "glm-4.5v", "glm-5",
        "glm-5.1", "glm-5.2", "glm-5.3",
    },
    "harmony": {"gpt-oss"},
    "hermes": {
        "Baichuan-M2", "DianJin-R1", "HuatuoGPT-o1-Qwen2.5", "InternVL3", "KAT-V1", "Ovis2", "QwQ-32B",
        "QwQ-32B-Preview", "Qwen3-Instruct", "Qwen3-Next-Instruct", "Qwen3-Next-Thinking", "Qwen3-Omni-Instruct",
        "Qwen3-Omni-Thinking", "Qwen3-Thinking", "Qwen3-VL-Instruct", "Qwen3-VL-Thinking", "XiYanSQL-QwenCoder-2504",
        "fin-r1", "qwen1.5-chat", "qwen1.5-moe-chat", "qwen2-instruct", "qwen2-moe-instruct", "qwen2.5-coder-instruct",
        "qwen2.5-instruct", "qwen2.5-instruct-1m", "qwen3", "vibethinker",
    },
    "llama3_json": {"HuatuoGPT-o1-LLaMA-3.1", "llama-3.1-instruct", "llama-3.3-instruct"},
    "mistral": {
        "mistral-instruct-v0.3", "mistral-large-instruct", "mistral-nemo-instruct", "mixtral-8x22B-instruct-v0.1",
    },
    "qwen3_coder": {
        "Nex-N2", "Ornith-1.0-35B", "Ornith-1.5-35B-A3B", "Ornith-1.5-397B", "Qwen3-Coder", "qwen3.5", "qwen3.6",
        "qwen3.8", "qwen3.8-Flash-Next", "qwen3.8-max",
    },
}  # fmt: skip
OTHERS = {"Kimi-K2.5", "MiniMax-M2", "MiniMax-M3", "deepseek-v3", "gemma-3-it", "minicpm5-1b", "seed-oss"}
"""With tools in another form, or none; `deepseek-v3` is a template that Xinference made up."""


def test_a_template_has_the_right_family_or_none() -> None:
    found: dict[str | None, set[str]] = {}
    for path in FOLDER.glob("*.json"):
        read = orjson.loads(path.read_bytes())
        template = (read[0] if isinstance(read, list) else read).get("chat_template")
        if template:
            found.setdefault(family_of(template), set()).add(path.stem)
    unknown = found.pop(None)
    assert found == KNOWN
    assert unknown >= OTHERS

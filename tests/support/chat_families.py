"""Families of models: real chat templates, from installed packages, and turns as each family writes them.

Tokenizers are byte-level, with the family's tokens. Templates of TRL are files in `trl/chat_templates`; those of
Xinference are fields of the files in `xinference/model/llm/models`; others are in `tests/data/templates`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.agents.environments import Opening, Step
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.agents.turns import Turn
from rollq.workers.groups.agent_loops import check_loop, make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, converse

THOUGHT = "The user asks for a product."
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|begin_of_text|>")
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|assistant|>", "<|observation|>")
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family. `call` is one call of the calculator, where VALUE is the expression and N its number among the calls;
    `around` and `between` are what encloses and separates calls. `thinks` holds a thought, THOUGHT, and `says` an
    answer, TEXT. `end` is the token that ends a turn, `call_end` that of a turn with calls.

    `segments` is how many segments a conversation of two turns with calls and an answer has; `kept`: thoughts are still
    in the prompt after the answer, at the user's next question.
    """

    template: str
    parsers: Mapping[str, str]
    tokens: Sequence[str]
    end: str
    call: str
    around: tuple[str, str] = ("", "")
    between: str | None = "\n"
    thinks: str = ""
    says: str = "TEXT"
    call_end: str | None = None
    segments: int = 1
    kept: bool = False

    @property
    def prompt(self) -> str:
        """The end of the prompt: some templates open the thoughts."""
        return "<think>\n" if self.thinks.startswith("THOUGHT") else ""

    def thinking(self, text: str, thought: str = THOUGHT) -> str:
        """A turn with a thought before it."""
        return self.thinks.replace("THOUGHT", thought) + text

    def calling(self, *values: str, first: int = 0) -> str:
        """A turn with calls; `first` is the number of the first one."""
        calls = (self.call.replace("N#", str(n)).replace("VALUE", value) for n, value in enumerate(values, first))
        return self.around[0] + (self.between or "").join(calls) + self.around[1]

    def saying(self, text: str) -> str:
        """A turn without calls."""
        return self.says.replace("TEXT", text)


HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "VALUE"}}\n</tool_call>'
JSON = '{"name": "calculator", "parameters": {"expression": "VALUE"}}'
XML = "<tool_call>\n<function=calculator>\n<parameter=expression>\nVALUE\n</parameter>\n</function>\n</tool_call>"
FENCED = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{"expression": "VALUE"}\n```<｜tool▁call▁end｜>'
)
LINES = "<think>\nTHOUGHT\n</think>\n\n"
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_TOKENS = (*DEEPSEEK, *THINK, "<｜User｜>", "<｜Assistant｜>")
BUILT_IN: Mapping[str, Family] = {
    "Qwen2.5": Family("trl:qwen2_5", {}, (*CHATML, *TOOL_CALL), "<|im_end|>", HERMES),
    "Qwen3": Family("trl:qwen3", {}, (*CHATML, *TOOL_CALL, *THINK), "<|im_end|>", HERMES, thinks=LINES),
    "Qwen3, found": Family(
        "trl:qwen3", {"tool_parser": "auto"}, (*CHATML, *TOOL_CALL, *THINK), "<|im_end|>", HERMES, thinks=LINES,
    ),
    "Qwen3-Coder": Family(
        "data:qwen3_coder", {"tool_parser": "qwen3_coder"}, (*CHATML, *TOOL_CALL), "<|im_end|>", XML,
    ),
    "Qwen3.6": Family(
        "trl:qwen3_6", {"tool_parser": "qwen3_xml"}, (*CHATML, *TOOL_CALL, *THINK), "<|im_end|>", XML,
        thinks="THOUGHT\n</think>\n\n",
    ),
    "Llama 3.1": Family("trl:llama3_1", {"tool_parser": "llama3_json"}, LLAMA, "<|eot_id|>", JSON, between="; "),
    "Llama 3.2": Family("trl:llama3_2", {"tool_parser": "llama3_json"}, LLAMA, "<|eot_id|>", JSON, between="; "),
    "Mistral Nemo": Family(
        "data:mistral_nemo", {"tool_parser": "mistral"}, MISTRAL, "</s>",
        '{"name": "calculator", "arguments": {"expression": "VALUE"}}', ("[TOOL_CALLS][", "]"), ", ", segments=2,
    ),
    "Ministral 3": Family(
        "data:ministral_3", {"tool_parser": "mistral"}, (*MISTRAL, "[ARGS]"), "</s>",
        '[TOOL_CALLS]calculator[ARGS]{"expression": "VALUE"}', between="",
    ),
    "Ministral 3, with thoughts": Family(
        "data:ministral_3", {"tool_parser": "mistral"}, (*MISTRAL, "[ARGS]", "[THINK]", "[/THINK]"), "</s>",
        '[TOOL_CALLS]calculator[ARGS]{"expression": "VALUE"}', between="", kept=True, thinks="[THINK]THOUGHT[/THINK]",
    ),
    "DeepSeek-V3": Family(
        "trl:deepseekv3", {"tool_parser": "deepseek_v3"}, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>", FENCED,
        DEEPSEEK_CALLS, thinks="THOUGHT\n</think>\n\n", segments=2,
        kept=True,  # after the tool's answer, the template renders a turn as it is
    ),
    "DeepSeek-R1-0528": Family(
        "data:deepseek_r1_0528", {"tool_parser": "deepseek_v3"}, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>", FENCED,
        DEEPSEEK_CALLS, thinks=LINES, segments=3,
    ),
    "DeepSeek-V3.1": Family(
        "data:deepseek_v3_1", {"tool_parser": "deepseek_v31"}, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>",
        '<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "VALUE"}<｜tool▁call▁end｜>',
        DEEPSEEK_CALLS, between="",
    ),
    "GLM-4.5": Family(
        "trl:glm4moe", {"tool_parser": "glm45"}, (*TOOL_CALL, *THINK, *GLM), "<|user|>",
        "\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        between="", thinks="\n<think>THOUGHT</think>", says="\nTEXT", call_end="<|observation|>",
    ),
    "GLM-4.7": Family(
        "data:glm_4_7", {"tool_parser": "glm47"}, (*TOOL_CALL, *THINK, *GLM), "<|user|>",
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>VALUE</arg_value></tool_call>",
        between="", thinks="THOUGHT</think>", call_end="<|observation|>",
    ),
    "GPT-OSS": Family(
        "trl:gptoss", {"tool_parser": "harmony"}, HARMONY, "<|return|>",
        ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "VALUE"}',
        between=None, call_end="<|call|>",
        thinks="<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant",
        says="<|channel|>final<|message|>TEXT",
    ),
    "GPT-OSS, recipient in the channel": Family(
        "trl:gptoss", {"tool_parser": "openai"}, HARMONY, "<|return|>",
        '<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression":"VALUE"}',
        between="<|call|><|start|>assistant", call_end="<|call|>",
        thinks="<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant",
        says="<|channel|>final<|message|>TEXT", segments=3,
    ),
}  # fmt: skip
"""Families whose turns rollq parses itself."""
OF_VLLM: Mapping[str, Family] = {
    "Qwen3, thoughts apart": Family(
        "trl:qwen3", {"reasoning_parser": "qwen3"}, (*CHATML, *TOOL_CALL, *THINK), "<|im_end|>", HERMES, thinks=LINES,
    ),
    "Kimi K2.5": Family(
        "xinference:Kimi-K2.5", {"tool_parser": "kimi_k2", "reasoning_parser": "kimi_k2"},
        (*KIMI, *THINK, "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"), "<|im_end|>",
        "<|tool_call_begin|>functions.calculator:N#<|tool_call_argument_begin|>"
        '{"expression": "VALUE"}<|tool_call_end|>',
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), between="", thinks="THOUGHT</think>",
    ),
}  # fmt: skip
"""Families whose turns a parser of vLLM parses."""
TEMPLATES = Path(__file__).parent.parent / "data" / "templates"


def template_of(source: str) -> str:
    """The template `data:NAME`, `trl:NAME` or `xinference:NAME`. Raises `FileNotFoundError` if the package is not
    installed.

    Packages that must not be imported, since vLLM would load plugins of theirs, lie in the environment's `templates`.
    """
    package, _, name = source.partition(":")
    if package == "data":
        return (TEMPLATES / f"{name}.jinja").read_text()
    spec = PathFinder.find_spec(package, [*sys.path, str(Path(sys.prefix) / "templates")])
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{source}: the package {package!r} is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if package == "trl":
        return (folder / "chat_templates" / f"{name}.jinja").read_text()
    description = orjson.loads((folder / "model" / "llm" / "models" / f"{name}.json").read_bytes())
    template: str = (description[0] if isinstance(description, list) else description)["chat_template"]
    return template


def tokenizer_with(folder: Path, tokens: Sequence[str], template: str, end: str, call_end: str | None) -> HfTokenizer:
    """A byte-level tokenizer with these tokens, which ends turns with `end` or `call_end`."""
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token="<s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    ends = [fast.convert_tokens_to_ids(token) for token in (end, call_end) if token is not None]
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": ends}))
    return HfTokenizer(folder)


def family_tokenizer(folder: Path, family: Family) -> HfTokenizer:
    """A byte-level tokenizer with the tokens and the chat template of a family."""
    return tokenizer_with(folder, family.tokens, template_of(family.template), family.end, family.call_end)


class Interview:
    """An environment that works out products, and asks a second question after the first answer."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Give the model the calculator."""
        return Opening(tools=(TOOL,))

    async def respond(self, turn: Turn) -> Step:
        """Answer calls with 42, and the first answer with a question."""
        self.turns.append(turn)
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        if calls:
            return Step(
                tuple({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "42"} for call in calls)
            )
        if sum(not earlier.calls for earlier in self.turns) == 2:
            return Step(done=True)
        return Step(({"role": "user", "content": "And 7*6?"},))

    async def teardown(self) -> None:
        """Release nothing."""


def sample_of(
    tokenizer: HfTokenizer, family: Family, turns: Sequence[tuple[str, bool]], loop: str, **options: Any
) -> tuple[Sample, Model]:
    """The sample of a model that writes these turns, each with whether it calls, and the model."""
    made = make_loop(loop, {**options, **family.parsers})
    check_loop(made, tokenizer)
    ends = [family.call_end if calls and family.call_end else family.end for _, calls in turns]
    words = [tokenizer.encode(text + end) for (text, _), end in zip(turns, ends, strict=True)]
    model = Model(tokenizer, words)
    return converse(made, model, max_tokens=100_000, max_prompt_tokens=100_000), model

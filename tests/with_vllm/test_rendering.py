"""Chat templates with options render in rollq as a real vLLM server renders them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_families import BUILT_IN, TOOL, family_tokenizer, template_of
from support.gateway_calls import run
from support.vllm_run import free_port, make_qwen3
from support.vllm_server import VllmServer

QUESTION = {"role": "user", "content": "6*7?"}
ARGUMENTS = {"expression": "6*7"}
ANSWERED = {"role": "tool", "tool_call_id": "call_0", "content": "42"}
TOKENS = 320


def calling(arguments: object) -> list[Mapping[str, Any]]:
    """A conversation with a call, whose arguments vLLM takes as JSON, and the template as an object."""
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "call_0", "type": "function", "function": function}
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, ANSWERED]


async def rendered(server: VllmServer, messages: Sequence[Any], options: Mapping[str, Any]) -> list[int]:
    """The token ids of a conversation at the server."""
    body = {"model": "tiny", "messages": messages, "tools": [TOOL], "chat_template_kwargs": options}
    url = server.url.replace("/v1", "/tokenize")
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        ids: list[int] = (await answer.json())["tokens"]
        return ids


@pytest.mark.parametrize("from_file", [False, True])
def test_options_and_files_render_as_at_a_server(tmp_path: Path, from_file: bool) -> None:
    folder = make_qwen3(tmp_path / "model", seed=0, vocab_size=TOKENS)
    tokenizer = family_tokenizer(folder, BUILT_IN["Qwen3"])
    more: tuple[str, ...] = ()
    if from_file:
        file = tmp_path / "other.jinja"
        file.write_text(template_of(BUILT_IN["Qwen3.6"].template))
        tokenizer, more = HfTokenizer(folder, file), ("--chat-template", str(file))

    async def compare(server: VllmServer) -> None:
        for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            own = tokenizer.with_options(options)
            assert own.chat([QUESTION], [TOOL]) == await rendered(server, [QUESTION], options)
            json = calling(orjson.dumps(ARGUMENTS).decode())
            assert own.chat(calling(ARGUMENTS), [TOOL]) == await rendered(server, json, options)

    with VllmServer(folder, free_port(), tmp_path / "server.log", *more) as server:
        server.wait()
        run(lambda: compare(server))

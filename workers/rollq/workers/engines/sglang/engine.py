"""An engine over SGLang servers: the `openai` engine's pool, with SGLang's native routes."""

from typing import ClassVar

import aiohttp

from rollq.workers.engines.openai.dialect import Description, Dialect
from rollq.workers.engines.openai.engine import OpenAIEngine, ServerSettings
from rollq.workers.engines.sglang import generate_api, weight_push
from rollq.workers.http.client import exchange


class SglangSettings(ServerSettings):
    """SGLang servers. Their URLs may end with `/v1`."""


async def describe(http: aiohttp.ClientSession, url: str, _: str | None, *, pushes: bool) -> Description:
    """See `Describe`. SGLang serves one model, and renames it at each update."""
    info = await exchange(http, "GET", f"{generate_api.root_of(url)}/server_info", None)
    dtype, sequences = generate_api.read_dtype(info), generate_api.read_max_sequences(info)
    return Description("", generate_api.read_context(info), dtype, sequences)


SGLANG = Dialect(
    "sglang",
    generate_api,
    weight_push,
    describe,
    warning="tested with SGLang 0.5.23 on a CPU, and never on a GPU: compare its logprobs before you rely on it",
)


class SglangEngine(OpenAIEngine):
    """`Engine` over SGLang's native routes."""

    dialect: ClassVar[Dialect] = SGLANG

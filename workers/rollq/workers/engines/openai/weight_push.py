"""Pushes weights into vLLM servers over HTTP, by development routes and `LoadExtension` in the servers' workers.

Invariant: a server whose `weight_version` names some weights holds all of them, and generates. A loading server has
another name, and a restarted server has vLLM's default name.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp

from rollq.workers.engines.openai.dialect import Weights
from rollq.workers.http.client import TransientError, exchange

LOADING = "loading"
NEEDED = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls rollq.workers.engines.vllm.extension.LoadExtension"
)


async def resume(http: aiohttp.ClientSession, url: str) -> None:
    """Resume a server that may have been left paused.

    Raises `TransientError`, or `ValueError` when the server has no routes for weights.
    """
    try:
        await _post(http, url, "resume")
    except ValueError as error:
        raise ValueError(f"{error}; it takes no weights: {NEEDED}") from error


async def check(http: aiohttp.ClientSession, url: str, weights: Weights) -> None:
    """Raise `TransientError` or `ValueError` if the server cannot read the folder. Changes nothing on the server."""
    await _call(http, url, "rollq_check", str(weights.folder))


async def dtype_of(http: aiohttp.ClientSession, url: str) -> str | None:
    """torch's name of a server's dtype, or the name of its quantization; None if unknown."""
    try:
        answer = await _call(http, url, "rollq_dtype")
        return str(answer["results"][0])
    except (TransientError, LookupError, TypeError, ValueError):
        return None


async def max_sequences_of(http: aiohttp.ClientSession, url: str) -> int | None:
    """The number of sequences that a server runs at a time; None if unknown."""
    try:
        answer = await _call(http, url, "rollq_max_sequences")
        return int(answer["results"][0])
    except (TransientError, LookupError, TypeError, ValueError):
        return None


async def load(http: aiohttp.ClientSession, url: str, weights: Weights) -> bool:
    """Make an idle server serve `weights`. Returns False if it already served them.

    Raises `TransientError` or `ValueError` if the load fails. The server then stays paused, under another name.
    """
    if await exchange(http, "GET", f"{_root(url)}/weight_info", None) == {"weight_version": weights.name}:
        return False
    await _post(http, url, "update_weight_version", {"new_version": LOADING})
    await _post(http, url, "pause?mode=abort&clear_cache=true")
    await _call(http, url, "rollq_load", str(weights.folder), dict(weights.copies))
    await _post(http, url, "resume")
    await _post(http, url, "update_weight_version", {"new_version": weights.name})
    return True


async def _call(http: aiohttp.ClientSession, url: str, method: str, *args: Any) -> Any:
    """Call a method of `LoadExtension` in every worker of the server."""
    return await _post(http, url, "collective_rpc", {"method": method, "args": args})


async def _post(http: aiohttp.ClientSession, url: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
    return await exchange(http, "POST", f"{_root(url)}/{route}", body)


def _root(url: str) -> str:
    """The root address of the routes, which are beside `/v1`."""
    return url.removesuffix("/v1")

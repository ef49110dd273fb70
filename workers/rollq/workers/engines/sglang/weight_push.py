"""Loads weights into SGLang servers over HTTP, by SGLang's routes.

Invariant: a server whose `weight_version` names some weights holds all of them, and generates. While a server loads, it
has a different name, which stays if the load fails, since SGLang may then hold a mixture. A restarted server has
SGLang's default name.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp

from rollq.workers.engines.openai.dialect import Weights
from rollq.workers.engines.sglang.generate_api import root_of
from rollq.workers.http.client import TransientError, exchange

LOADING = "loading"
NEEDED = "SGLang loads them by /update_weights_from_disk"


async def resume(http: aiohttp.ClientSession, url: str) -> None:
    """Resume a server that may have been left paused. Raises `TransientError` or `ValueError`."""
    await _post(http, url, "continue_generation", {})


async def check(http: aiohttp.ClientSession, url: str, weights: Weights) -> None:
    """Do nothing: SGLang has no route that reads a folder without loading it."""


async def load(http: aiohttp.ClientSession, url: str, weights: Weights) -> bool:
    """Make an idle server serve `weights`. Returns False if it already served them.

    Raises `TransientError`, including when the server cannot load the weights, or `ValueError`. The server then stays
    paused, under a different name.
    """
    info = await exchange(http, "GET", f"{root_of(url)}/model_info", None)
    if isinstance(info, dict) and info.get("weight_version") == weights.name:
        return False
    await _post(http, url, "update_weight_version", {"new_version": LOADING})
    await _post(http, url, "pause_generation", {"mode": "abort"})
    try:
        await _post(http, url, "update_weights_from_disk", {"model_path": str(weights.folder), "flush_cache": True})
    except ValueError as error:  # the folder may not exist yet
        raise TransientError(str(error)) from error
    await _post(http, url, "continue_generation", {})
    await _post(http, url, "update_weight_version", {"new_version": weights.name})
    return True


async def _post(http: aiohttp.ClientSession, url: str, route: str, body: Mapping[str, Any]) -> None:
    """Call a route. Raises `ValueError` if the route reports a failure."""
    answer = await exchange(http, "POST", f"{root_of(url)}/{route}", body)
    if not isinstance(answer, dict) or answer.get("success") is False:
        raise ValueError(f"{url}: {route} failed: {answer!r:.200}")

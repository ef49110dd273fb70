"""The served model, as `GET /v1/models` and `GET /v1/models/{id}` describe it. Pure.

OpenAI and Anthropic use one path; an object with both APIs' fields suits all clients.
"""

from datetime import UTC, datetime
from typing import Any


def models_at(path: str, name: str, created_s: int, most_tokens: int | None) -> dict[str, Any]:
    """The list of models at the path `/models`, or the model that the path names, which may have any name."""
    if path == "/models":
        return model_list(name, created_s, most_tokens)
    return model(path.removeprefix("/models/"), created_s, most_tokens)


def model(name: str, created_s: int, most_tokens: int | None) -> dict[str, Any]:
    """The model's description. `most_tokens` is the largest number of tokens in a prompt, None if unknown."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "rollq",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "lifecycle": "active",
        "capabilities": None,
        "max_input_tokens": most_tokens,
        "max_tokens": most_tokens,
    }


def model_list(name: str, created_s: int, most_tokens: int | None) -> dict[str, Any]:
    """The list of all models, which has only the served model."""
    only = model(name, created_s, most_tokens)
    return {"object": "list", "data": [only], "has_more": False, "first_id": name, "last_id": name}

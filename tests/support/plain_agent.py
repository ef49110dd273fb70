"""An agent for tests: calls the model with a calculator until it gets an answer without calls. Only Python's library.

`python plain_agent.py [CHECK]`: with CHECK, it posts a reward of its own, 0.5. It writes the answers that it gets to a
file of its own in the folder SEEN, if this variable is set.
"""

import json
import os
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def post(url: str, body: dict[str, Any], key: str = os.environ.get("OPENAI_API_KEY", "")) -> dict[str, Any]:
    """The JSON answer to a JSON request."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def main() -> None:
    """Talk until the model has no more calls."""
    assert not [name for name in os.environ if name.startswith("ROLLQ_") and "SESSION" not in name]
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.stdin.read()}]
    while True:
        body = {"model": "rollq", "messages": messages, "tools": [TOOL]}
        message = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        if "SEEN" in os.environ:
            with open(f"{os.environ['SEEN']}/{os.environ['OPENAI_API_KEY']}", "a") as seen:
                seen.write(json.dumps(messages[-1]) + "\n")
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            left, right = json.loads(call["function"]["arguments"])["expression"].split("*")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(int(left) * int(right))})
    if sys.argv[1:]:
        reward = {"reward": 0.5, "parts": {"style": 0.25}}
        key = os.environ.get("REWARD_TOKEN", os.environ["OPENAI_API_KEY"])
        post(os.environ["ROLLQ_SESSION_URL"] + "/reward", reward, key)


if __name__ == "__main__":
    main()

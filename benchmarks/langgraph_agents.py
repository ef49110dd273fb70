"""Agents of LangGraph with a calculator, which take the sessions of a worker's gateway until they are ended.

`python langgraph_agents.py GATEWAY_URL`, with the worker's key in ROLLQ_GATEWAY_KEY. Needs langchain and
langchain-openai, and no part of rollq.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

AGENTS = 32
"""Concurrent agents."""
WAIT_S = 0.1
"""Pause before an agent asks again for a session."""


def calculator(expression: str) -> str:
    """Work out a sum of two numbers."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


def use_sessions(gateway: str) -> None:
    """Take one session after another, and let an agent work on its prompt; the task's judge rewards it."""
    with httpx.Client(timeout=600) as http:
        while True:
            key = {"Authorization": f"Bearer {os.environ['ROLLQ_GATEWAY_KEY']}"}
            try:
                taken = http.post(f"{gateway}/sessions", json={"wait_s": 30}, headers=key)
            except httpx.TransportError:  # the worker has not started, or has ended
                taken = None
            if taken is None or taken.status_code != httpx.codes.OK:
                time.sleep(WAIT_S)
                continue
            session = taken.json()
            model = ChatOpenAI(
                model="rollq", base_url=session["openai_base_url"], api_key=session["token"], http_client=http
            )
            agent = create_agent(model, tools=[calculator])
            reward: float | None = None
            try:
                agent.invoke({"messages": session["prompt"]})
            except ValueError:  # of the calculator: the model's expression is not a sum
                reward = 0.0
            except Exception as error:  # noqa: BLE001 - what ends a session, such as new weights, ends no agent
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            right = {"Authorization": f"Bearer {session['reward_token']}"}
            http.post(f"{session['session_url']}/reward", json={"reward": reward}, headers=right)


if __name__ == "__main__":
    with ThreadPoolExecutor(AGENTS) as threads:
        for _ in range(AGENTS):
            threads.submit(use_sessions, sys.argv[1])

"""An agent on Google's ADK, with a tool."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def main() -> None:
    agent = Agent(name="sums", model=LiteLlm("openai/rollq"), tools=[calculator])
    events = await InMemoryRunner(agent).run_debug(sys.stdin.read(), quiet=True)
    print(events[-1].content.parts[0].text)


asyncio.run(main())

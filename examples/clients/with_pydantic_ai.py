"""An agent on pydantic-ai, with a tool."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("rollq"))


@agent.tool_plain
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


print(agent.run_sync(sys.stdin.read()).output)

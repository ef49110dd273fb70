"""An agent on agno, with a tool."""

import os
import sys

from agno.agent import Agent
from agno.models.openai import OpenAILike


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


model = OpenAILike("rollq", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(model=model, tools=[calculator], telemetry=False)
print(agent.run(sys.stdin.read()).content)

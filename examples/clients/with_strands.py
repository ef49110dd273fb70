"""An agent on Strands Agents, with a tool."""

import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


agent = Agent(OpenAIModel(model_id="rollq"), tools=[calculator], callback_handler=None)
print(agent(sys.stdin.read()))

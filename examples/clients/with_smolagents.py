"""An agent on smolagents, with a tool."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: two numbers, with * between them
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


model = OpenAIServerModel("rollq", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[calculator], model=model)
print(agent.run(sys.stdin.read()))

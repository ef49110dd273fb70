"""An agent on AutoGen, with a tool."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


about = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
model = OpenAIChatCompletionClient(model="rollq", model_info=about)
agent = AssistantAgent("sums", model, tools=[calculator], max_tool_iterations=10)
result = asyncio.run(agent.run(task=sys.stdin.read()))
print(result.messages[-1].content)

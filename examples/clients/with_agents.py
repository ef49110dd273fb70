"""An agent on OpenAI's Agents SDK, with a tool."""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


set_tracing_disabled(True)
agent = Agent(name="sums", model="rollq", tools=[calculator])
print(Runner.run_sync(agent, sys.stdin.read()).final_output)

"""An agent on CrewAI, with a tool."""

import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_DISABLE_VERSION_CHECK": "true"}
from crewai import LLM, Agent
from crewai.tools import tool


@tool
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


model = LLM("rollq", provider="openai")
agent = Agent(role="sums", goal="Work out products.", backstory="", llm=model, tools=[calculator])
print(agent.kickoff(sys.stdin.read()).raw)

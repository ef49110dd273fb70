"""An agent on LangChain, with a tool."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


agent = create_agent(ChatOpenAI(model="rollq"), tools=[calculator])
state = agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
print(state["messages"][-1].content)

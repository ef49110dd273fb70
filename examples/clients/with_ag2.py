"""An agent on ag2, with a tool."""

import sys

from autogen import ConversableAgent, LLMConfig


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def is_answer(message: dict) -> bool:
    return not message.get("tool_calls")


agent = ConversableAgent("sums", llm_config=LLMConfig({"model": "rollq"}), functions=[calculator])
chat = agent.run(message=sys.stdin.read(), max_turns=20, executor_kwargs={"is_termination_msg": is_answer})
chat.process()
print(chat.summary)

"""An agent on dspy, with a tool."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


dspy.configure(lm=dspy.LM("openai/rollq", cache=False), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))
agent = dspy.ReAct("question -> answer", tools=[calculator])
print(agent(question=sys.stdin.read()).answer)

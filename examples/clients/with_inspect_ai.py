"""An agent on inspect-ai, with a tool."""

import sys

import inspect_ai
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import tool


@tool
def calculator():
    async def work_out(expression: str) -> str:
        """Work out a product.

        Args:
            expression: two numbers, with * between them
        """
        left, right = expression.split("*")
        return str(int(left) * int(right))

    return work_out


task = Task([Sample(sys.stdin.read())], solver=react(tools=[calculator()], submit=False))
(log,) = inspect_ai.eval(task, model="openai/rollq", model_args={"responses_api": False}, display="none")
print(log.samples[0].output.completion)

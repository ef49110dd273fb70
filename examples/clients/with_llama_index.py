"""An agent on LlamaIndex, with a tool."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def main() -> None:
    model = OpenAILike(
        "rollq",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    print(await FunctionAgent(tools=[calculator], llm=model).run(sys.stdin.read()))


asyncio.run(main())

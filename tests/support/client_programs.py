"""Agents over other people's clients, as programs. Each asks two subagents at once, calls a calculator, compacts its
history, and goes on."""

CALCULATOR = '''
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: two numbers, with * between them
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))
'''
OPENAI = (
    CALCULATOR
    + '''
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI()


def check(task: str) -> str:
    return ask([{"role": "user", "content": task}], calculator)


def tool(function):
    (name, *_) = function.__annotations__
    properties = {name: {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": function.__name__, "parameters": parameters}}


def ask(messages, *functions):
    """Ask until there is an answer without calls; what is said is added to the messages."""
    tools = {"tools": list(map(tool, functions))} if functions else {}
    while True:
        message = client.chat.completions.create(model="rollq", messages=messages, **tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        with ThreadPoolExecutor() as threads:
            results = list(threads.map(lambda call: run(call.function, functions), message.tool_calls))
        for call, result in zip(message.tool_calls, results):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def run(call, functions):
    (function,) = [each for each in functions if each.__name__ == call.name]
    return function(**json.loads(call.arguments))


messages = [{"role": "user", "content": sys.stdin.read()}]
ask(messages, check, calculator)
summary = ask([*messages, {"role": "user", "content": "Summarise."}])
print(ask([{"role": "user", "content": f"So far: {summary} Go on."}], check, calculator))
'''
)
LANGCHAIN = (
    CALCULATOR
    + '''
import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="rollq")
checker = create_agent(model, tools=[calculator])


def check(task: str) -> str:
    """Check a part."""
    return checker.invoke({"messages": [{"role": "user", "content": task}]})["messages"][-1].content


compacting = SummarizationMiddleware(model=model, trigger=("messages", 6), keep=("messages", 2))
agent = create_agent(model, tools=[check, calculator], middleware=[compacting])
state = agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
print(state["messages"][-1].content)
'''
)
AGENTS = (
    CALCULATOR
    + """
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
work_out = function_tool(calculator)
checker = Agent(name="checker", model="rollq", tools=[work_out])
check = checker.as_tool(tool_name="check", tool_description="Check a part.")
agent = Agent(name="sums", model="rollq", tools=[check, work_out])
made = Runner.run_sync(agent, sys.stdin.read())
asked = {"role": "user", "content": "Summarise."}
summary = Runner.run_sync(Agent(name="summaries", model="rollq"), [*made.to_input_list(), asked]).final_output
print(Runner.run_sync(agent, f"So far: {summary} Go on.").final_output)
"""
)
PYDANTIC_AI = (
    CALCULATOR
    + '''
import sys

from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import ModelRequest, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel("rollq")
checker = Agent(model, tools=[calculator])
summaries = Agent(model)


async def check(task: str) -> str:
    """Check a part."""
    return (await checker.run(task)).output


async def compact(messages):
    if len(messages) < 5:
        return messages
    summary = (await summaries.run("Summarise.", message_history=messages)).output
    return [ModelRequest(parts=[UserPromptPart(f"So far: {summary} Go on.")])]


agent = Agent(model, tools=[check, calculator], capabilities=[ProcessHistory(compact)])
print(agent.run_sync(sys.stdin.read()).output)
'''
)
SMOLAGENTS = (
    CALCULATOR
    + """
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.memory import TaskStep

model = OpenAIServerModel("rollq", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
work_out = tool(calculator)
checker = ToolCallingAgent(tools=[work_out], model=model, name="check", description="Checks a part.")


def compact(step, agent):
    if step.step_number == 2:
        asked = {"role": "user", "content": [{"type": "text", "text": "Summarise."}]}
        summary = model.generate([*agent.write_memory_to_messages(), asked]).content
        agent.memory.steps = [TaskStep(task=f"So far: {summary} Go on.")]


agent = ToolCallingAgent(
    tools=[work_out],
    managed_agents=[checker],
    model=model,
    step_callbacks=[compact],
    max_tool_threads=1,  # a checker has one memory, which its next task empties
)
print(agent.run(sys.stdin.read()))
"""
)

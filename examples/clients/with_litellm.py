"""An agent on LiteLLM, with a tool."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
calculator = {"type": "function", "function": {"name": "calculator", "parameters": parameters}}
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    answer = litellm.completion(model="openai/rollq", messages=messages, tools=[calculator])
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        left, right = json.loads(call.function.arguments)["expression"].split("*")
        result = str(int(left) * int(right))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)

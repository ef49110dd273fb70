"""An agent on Anthropic's SDK."""

import sys

from anthropic import Anthropic

client = Anthropic()
question = {"role": "user", "content": sys.stdin.read()}
answer = client.messages.create(model="rollq", max_tokens=1000, messages=[question])
print(answer.content[-1].text)

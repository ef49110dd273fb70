"""An agent on OpenAI's SDK."""

import sys

from openai import OpenAI

client = OpenAI()
answer = client.responses.create(model="rollq", input=sys.stdin.read())
print(answer.output_text)

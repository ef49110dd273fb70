"""An agent on instructor, whose answer is an object."""

import sys

import instructor
from pydantic import BaseModel


class Result(BaseModel):
    product: int


client = instructor.from_provider("openai/rollq")
question = {"role": "user", "content": sys.stdin.read()}
result = client.create(response_model=Result, messages=[question])
print("It is", result.product)

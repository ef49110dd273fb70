// An agent on Vercel's AI SDK, with a tool.
import { readFileSync } from "node:fs";
import { openai } from "@ai-sdk/openai";
import { generateText, isStepCount, tool } from "ai";
import { z } from "zod";

const calculator = tool({
  description: "Work out a product.",
  inputSchema: z.object({ expression: z.string() }),
  execute: ({ expression }) => {
    const [left, right] = expression.split("*");
    return String(left * right);
  },
});
const prompt = readFileSync(0, "utf8");
const answer = await generateText({ model: openai("rollq"), tools: { calculator }, stopWhen: isStepCount(10), prompt });
console.log(answer.text);

"""A task set of verifiers: sums, with a calculator if asked for, and with ways to go wrong."""

import asyncio
from typing import Literal

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int
    trap: str = ""


class CalculatorConfig(vf.ToolsetConfig):
    pass


class Calculator(vf.Toolset[CalculatorConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, one: int, other: int) -> str:
        """Add two numbers."""
        if one == 13:
            raise ValueError("no thirteens")
        return str(one + other)


class SumTaskConfig(vf.TaskConfig):
    tools: bool = False


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Calculator(CalculatorConfig())] if config.tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.trap == "setup":
            raise RuntimeError("the setup is broken")

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.trap == "grader":
            raise RuntimeError("the grader is broken")
        return float((trace.last_reply or "").strip() == str(self.data.answer))

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        if self.data.trap == "hang" and (trace.last_reply or "") != "0":
            await asyncio.sleep(3600)
        return float(len(trace.last_reply or "") < 10)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    split: Literal["train", "test"] = "train"
    count: int = 20
    system: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        traps = {3: "grader", 4: "setup", 5: "hang"}
        start = 0 if self.config.split == "train" else 1000
        return [
            SumTask(
                SumData(
                    prompt=f"{number}+1?",
                    answer=number + 1,
                    trap=traps.get(number, ""),
                    system_prompt="Only the number." if self.config.system else None,
                ),
                self.config.task,
            )
            for number in range(start, start + self.config.count)
        ]


if __name__ == "__main__":
    Calculator.run()

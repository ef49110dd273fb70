"""A task set of verifiers whose toolset dies when it starts."""

import verifiers.v1 as vf

__all__ = ["Faulty"]


class DyingConfig(vf.ToolsetConfig):
    pass


class Dying(vf.Toolset[DyingConfig, vf.State]):
    async def setup(self) -> None:
        raise RuntimeError("the index is missing")

    @vf.tool
    async def search(self, text: str) -> str:
        """Search."""
        return text


class FaultyTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Dying(DyingConfig())]

    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


class Faulty(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self) -> list[FaultyTask]:
        return [FaultyTask(vf.TaskData(prompt="Search."), self.config.task)]


if __name__ == "__main__":
    Dying.run()

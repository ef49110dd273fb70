"""A judge with its name, and the resources for making judges."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.common.sealing.probe import require_sealing
from rollq.buffer.common.user_functions import Contract, check_function
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.http.pools import ModelPool
from rollq.workers.judging.options import NONE
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import Answer, InvalidReward, Verdict, check_answer
from rollq.workers.user_code.call_slots import CallsHang
from rollq.workers.user_code.calls import UserFunction, guarded
from rollq.workers.user_code.errors import reason_of, said_by

log = logging.getLogger(__name__)

JudgeFunction = Callable[[Prompt, Sample], Answer | Awaitable[Answer]]
Close = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """The resources for making judges: the time limit per sample, processes for judges that need the CPU, and auxiliary
    models.

    With `isolate`, custom judges run in these processes too, or in sealed processes.
    """

    timeout_s: float
    processes: JudgePool
    isolate: Literal[False, True, "sealed"] = False
    pools: Mapping[str, ModelPool] = field(default_factory=dict)

    def processes_of(self, path: str, *modules: str) -> JudgePool:
        """The processes for the custom function at `path`, which `modules` call. Raises `ConfigError` if they must be
        sealed and cannot be."""
        if self.isolate != "sealed":
            return self.processes
        require_sealing('isolate_judge = "sealed"', "set it to true if you trust the judge with the model's text")
        return self.processes.sealed(*modules, path.rpartition(".")[0])


async def nothing_to_close() -> None:
    """Close a judge that holds no connections."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge with its name. `asks_models` is true if it takes the pools of auxiliary models. If each row names a
    judge, `choose` returns a prompt's judge, one of `others`."""

    name: str
    call: UserFunction
    close: Close = nothing_to_close
    asks_models: bool = False
    choose: Callable[[Prompt], "Judge"] | None = None
    others: Sequence["Judge"] = ()
    failures: LogOnce = field(default_factory=lambda: LogOnce(log))

    @property
    def hanging(self) -> int:
        """The number of calls that are long overdue."""
        return self.call.slots.hanging + sum(judge.hanging for judge in self.others)

    def of(self, prompt: Prompt) -> "Judge":
        """The prompt's judge. Raises `ValueError` for a prompt without a judge."""
        return self.choose(prompt) if self.choose else self

    def name_for(self, prompt: Prompt) -> str:
        """The last part of the name of a prompt's judge; empty for a prompt without a judge."""
        try:
            return self.of(prompt).name.rpartition(".")[2]
        except ValueError:
            return ""

    async def judge(self, prompt: Prompt, sample: Sample) -> Verdict:
        """The reward of a completed sample, or an error. An error with a cause is logged once."""
        verdict = await self.verdict(prompt, sample)
        if verdict.error and verdict.cause:
            message = "judge %s failed; its samples keep this error, which is not logged again"
            self.failures.warning(verdict.error, message, self.name, exc_info=verdict.cause)
        return verdict

    async def verdict(self, prompt: Prompt, sample: Sample) -> Verdict:
        """The reward of a completed sample, or an error. The judge `none` returns neither."""
        if self.name == NONE:
            return Verdict()
        if self.choose:
            return await self._chosen(prompt, sample)
        try:
            answer = await self.call(prompt, sample)
        except Exception as error:  # noqa: BLE001 - any error in a judge fails only its sample
            return self._raised(error)
        try:
            with guarded():
                return check_answer(answer, sample)
        except Exception as error:  # noqa: BLE001 - the answer may be any object
            return self._failed(reason_of(error), error)

    async def _chosen(self, prompt: Prompt, sample: Sample) -> Verdict:
        """The verdict of the prompt's judge."""
        try:
            judge = self.of(prompt)
        except ValueError as error:
            return Verdict(error=f"judge: {error}")
        return await judge.verdict(prompt, sample)

    def _raised(self, error: Exception) -> Verdict:
        match error:
            case TimeoutError():
                return self._failed(str(error), raised=True)
            case CallsHang():
                return self._failed(f"{error}; set judging.isolate_judge = true to kill calls that take too long")
            case SampleFailed():
                return self._failed(said_by(error), error)._replace(failure=error.kind)
            case InvalidReward():
                return self._failed(str(error), error)
        reason = str(error) if isinstance(error, JudgeFailed) else reason_of(error)
        return self._failed(reason, error, raised=True)

    def _failed(self, reason: str, cause: Exception | None = None, *, raised: bool = False) -> Verdict:
        return Verdict(error=f"judge {self.name!r}: {reason}", raised=raised, cause=cause)


def takes_pools(function: Callable[..., Any]) -> bool:
    """Whether a custom judge has a parameter `pools`."""
    try:
        return "pools" in inspect.signature(function).parameters
    except ValueError:  # written in C
        return False


def with_pools(
    function: Callable[..., Any], contract: Contract, path: str, pools: Mapping[str, ModelPool]
) -> Callable[..., Any]:
    """Bind the pools to a custom judge that takes them. Raises `ConfigError` without pools, or if the judge cannot be
    called.
    """
    check_function(function, contract, path)
    if not pools:
        raise ConfigError(f'{contract.setting} = "{path}" takes pools, but none is set: add [worker.pools.<name>]')
    return partial(function, pools=pools)

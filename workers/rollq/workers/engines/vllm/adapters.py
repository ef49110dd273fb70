"""LoRA adapters in vLLM: the adapter for new requests, and the adapters that running requests still use.

Invariant: vLLM never needs more adapters than it has room for. Otherwise, vLLM would drop the least recently used
adapter, reload it when a request needs it, and die if the adapter's folder is gone by then.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from rollq.buffer.errors import WeightsError
from rollq.workers.engines.gate import Call
from rollq.workers.engines.protocol import WeightsVersion
from rollq.workers.engines.vllm.api import name_of
from rollq.workers.engines.vllm.process import VllmProcess


@dataclass(slots=True, eq=False)
class VllmCall(Call):
    """A request in vLLM under a unique `name`. Its tokens come from the model with `adapter`; None means the model
    alone."""

    name: str = field(kw_only=True)
    adapter: LoRARequest | None = None


def used_adapters(calls: Collection[VllmCall]) -> set[int]:
    """vLLM's numbers for the adapters that these calls use; newer adapters have larger numbers."""
    return {call.adapter.lora_int_id for call in calls if call.adapter is not None}


def outlives(calls: Collection[VllmCall], *, adapter: bool, spared: int) -> Callable[[VllmCall], bool]:
    """Return a function that decides whether one of `calls` may run through a swap, to an `adapter` or to other
    weights.

    Only calls with the `spared` newest adapters may. On the CPU, vLLM applies the adapter in its last slot to requests
    without an adapter that share a step with others, so these requests must end before an adapter is loaded.
    """
    used = sorted(used_adapters(calls))
    ending = used[: max(len(used) - spared, 0)]

    def may_stay(call: VllmCall) -> bool:
        if call.adapter is None:
            return not (adapter and current_platform.is_cpu())
        return call.adapter.lora_int_id not in ending

    return may_stay


class Adapters:
    """The adapters that vLLM has loaded. `current` serves new requests; None means the model alone."""

    def __init__(self, process: VllmProcess) -> None:
        self.current: LoRARequest | None = None
        self._process = process
        self._loaded: set[int] = set()
        self._number = 0

    def spared(self, adapter: bool) -> int:
        """The number of adapters that may stay in use during a swap, to an `adapter` or to other weights.

        0 if the base weights change, because tokens carry only the adapter's version. Otherwise, vLLM's room beside the
        new adapter.
        """
        return self._process.max_adapters - 1 if adapter and self._process.max_adapters else 0

    async def load(self, folder: Path, version: WeightsVersion, used: set[int]) -> None:
        """Serve new requests with the adapter in `folder`. Running requests finish with the `used` adapters.

        Raises `WeightsError` if vLLM refuses the adapter, and `EngineDead` if vLLM dies.
        """
        self._number += 1
        adapter = LoRARequest(name_of(version), self._number, str(folder))
        for unused in self._loaded - used:  # keeps vLLM from dropping an adapter in use to make room
            await self._process.change(self._process.llm.remove_lora(unused))
        self._loaded = used
        try:
            added = await self._process.unless_dead(self._process.llm.add_lora(adapter))
        except EngineDeadError as error:
            raise self._process.failed(f"vLLM died as it loaded adapter {str(folder)!r}: {error}") from error
        except Exception as error:
            raise WeightsError(f"vLLM refuses adapter {str(folder)!r}: {error}") from error
        if not added:
            raise WeightsError(f"vLLM refuses adapter {str(folder)!r}")
        self.current = adapter
        self._loaded.add(adapter.lora_int_id)

"""The ranks of a trainer: the processes of one launch, each with a GPU, that train as one.

Rank 0 leads: it waits for batches, calls the server, and decides the next action of all ranks. torch is imported only
for more than one rank.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import orjson

from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.errors import ConfigError

T = TypeVar("T")

PATIENCE = timedelta(days=365)
"""How long ranks wait for rank 0: batches may take days. If a rank dies, the launch ends, and so does the wait."""


class Ranks:
    """One rank of several, or the only one. Values that ranks exchange are JSON."""

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0, launch_id: str | None = None) -> None:
        """Use `join_ranks`. `local_rank` is the number of this rank on its machine; `launch_id` names the launch."""
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.launch_id = launch_id
        self._group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1

    def join(self) -> None:
        """Open the group over which ranks communicate. All ranks call it, once torch's default group exists."""
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.launch_id = self.lead(lambda: secrets.token_hex(8))

    def lead(self, decide: Callable[[], T]) -> T:
        """Call `decide` on rank 0 only, and return its result on every rank. All ranks wait for it."""
        if not self.are_several:
            return decide()
        answers = self.gather(decide() if self.is_first else None)
        decided: T = answers[0]
        return decided

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. All ranks call it."""
        return any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in their order. All ranks call it."""
        return [orjson.loads(data) for data in self.gather_bytes(orjson.dumps(value))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order. All ranks call it."""
        if not self.are_several:
            return [data]
        import torch
        import torch.distributed as dist

        own = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(map(int, sizes))
        padded = torch.nn.functional.pad(own, (0, longest - len(data)))
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [bytes(buffer[: int(size)].numpy()) for buffer, size in zip(gathered, sizes, strict=True)]

    def take_turns(self) -> Iterator[bool]:
        """Yield once per rank of a machine whether it is this rank's turn, so ranks use memory one at a time."""
        turns = max(self.gather(self.local_rank)) + 1
        for turn in range(turns):
            yield turn == self.local_rank
            self.gather(None)


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """The ranks of this launch: started by `rollq train --ranks` or torchrun, or only this process.

    `device` is the torch device of the model; with several ranks, it is `cpu`, or `cuda` for the GPU of the local rank.
    Raises `ConfigError` if a launcher variable is not a number, for any other device of several ranks, and if a rank
    has no GPU.
    """
    world_size = _number("WORLD_SIZE", 1)
    if world_size == 1:
        yield Ranks()
        return
    import torch
    import torch.distributed as dist

    ranks = Ranks(_number("RANK", 0), world_size, _number("LOCAL_RANK", 0))
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"[trainer] device = {device!r}: must be 'cpu' or 'cuda' with several ranks; each rank gets its GPU"
        )
    if device == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {ranks.rank} needs GPU {ranks.local_rank}, but this machine has {torch.cuda.device_count()}: "
                "start one rank per GPU"
            )
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        ranks.join()
        yield ranks
    finally:
        dist.destroy_process_group()


def check_same(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, naming the setting, on a rank whose `settings` differ from rank 0's."""
    everywhere = ranks.gather(settings)
    for name, first in everywhere[0].items():
        value = everywhere[ranks.rank].get(name)
        if value != first:
            raise ConfigError(
                f"rank {ranks.rank} has [trainer] {name} = {value!r}, but rank 0 has {first!r}: start all ranks with "
                "the same settings"
            )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if (number := whole_number(text)) is None:
        raise ConfigError(f"the environment variable {name} = {text[:40]!r} of the launcher is not a number")
    return number

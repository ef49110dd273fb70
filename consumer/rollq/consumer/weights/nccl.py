"""The trainer's side of vLLM's NCCL weight transfer, the only module of the consumer that needs vLLM (0.32 or later).

Not tested on GPUs: the tests of the code around it use gloo instead.
"""

from collections.abc import Iterable
from typing import Any

from rollq.buffer.errors import ConfigError

BUFFER_BYTES = 1 << 30
"""Size of the buffers for packed tensors, the same on both sides."""
BUFFERS = 2
"""Number of buffers in flight."""


class NcclRendezvous:
    """Connects to vLLM's workers from the current GPU. Raises `ConfigError` without vLLM or a GPU."""

    def __init__(self) -> None:
        try:
            import torch
            import vllm.distributed.weight_transfer.nccl_common  # noqa: F401 - checks that it is installed
        except ImportError as error:
            raise ConfigError(
                f"transport 'nccl' needs vLLM beside the trainer ({error}): pip install 'rollq[vllm]', "
                "or set transport = 'path'"
            ) from error
        if not torch.cuda.is_available():
            raise ConfigError("transport 'nccl' sends from a GPU, and this trainer has none: set transport = 'path'")
        self._device = torch.cuda.current_device()

    def __call__(self, address: str, port: int, world_size: int) -> "NcclProcessGroup":
        return NcclProcessGroup(address, port, world_size, self._device)

    def init_info(self, address: str, port: int, world_size: int) -> dict[str, Any]:
        """The fields of vLLM's `NCCLWeightTransferInitInfo`, except the rank."""
        return {
            "master_address": address,
            "master_port": port,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": BUFFERS,
        }


class NcclProcessGroup:
    """Rank 0 of a process group with vLLM's workers, on the GPU `device`."""

    def __init__(self, address: str, port: int, world_size: int, device: int) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(device)  # the current device belongs to the thread
        rendezvous = {"master_address": address, "master_port": port, "world_size": world_size}
        self._device = device
        self._communicator = trainer_init(rendezvous)
        if self._communicator.disabled:
            raise RuntimeError("vLLM found no NCCL library and cannot send weights")

    def send(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Broadcast all tensors, after other CUDA streams have computed them."""
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.synchronize(self._device)
        packed_nccl_broadcast_producer(
            iterator=((name, tensor.detach().to(self._device)) for name, tensor in tensors),
            group=self._communicator,
            src=0,
            post_iter_func=lambda named: named[1],
            buffer_size_bytes=BUFFER_BYTES,
            num_buffers=BUFFERS,
        )
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Abort the communicator; vLLM waits for it at most 5 s."""
        self._communicator.destroy()

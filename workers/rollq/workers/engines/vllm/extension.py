"""Methods that rollq adds to vLLM's worker processes, which load weights into the running model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rollq.buffer.weights.manifest import weight_files
from rollq.workers.engines.tensors import read_tensors


class LoadExtension:
    """Mixed into vLLM's worker, whose methods it calls."""

    reload_weights: Any
    weight_transfer_engine: Any
    init_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def rollq_check(self, folder: str) -> None:
        """Raise `WeightsError` unless this machine can read the weights in `folder`."""
        read_tensors(Path(folder))

    def rollq_load(self, folder: str, copies: Mapping[str, str]) -> None:
        """Load all tensors of `folder`, and those named by the keys of `copies` once more, under the values.

        vLLM loads a tied head only under a separate name. Without it, a kernel that packs its weights (on the CPU)
        silently keeps the old ones.
        """
        self.rollq_check(folder)  # a reload that fails half-way kills vLLM at its next step
        self.reload_weights(weights_iterator=_tensors(Path(folder), copies))

    def rollq_receive(self, init_info: dict[str, Any], update_info: dict[str, Any]) -> None:
        """Join the trainer in a new process group, and load the weights that it sends by vLLM's weight transfer."""
        self.init_weight_transfer_engine(init_info)
        try:
            if getattr(getattr(self.weight_transfer_engine, "model_update_group", None), "disabled", False):
                raise RuntimeError("vLLM found no NCCL library, and would load whatever is in memory")
            self.start_weight_update()
            self.update_weights(update_info)
            self.finish_weight_update()
        finally:
            self.weight_transfer_engine.shutdown()


def _tensors(folder: Path, copies: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The tensors of `folder`, with only one in memory at a time."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                yield name, tensor
                if name in copies:
                    yield copies[name], tensor

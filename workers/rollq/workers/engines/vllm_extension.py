"""What rollq adds to vLLM's worker processes: loading a folder of weights into the running model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rollq.buffer.manifest import weight_files
from rollq.workers.engines.checkpoint import tensor_shapes


class LoadExtension:
    """Mixed into vLLM's worker, whose `reload_weights` it calls."""

    reload_weights: Any

    def rollq_check(self, folder: str) -> None:
        """Raise `WeightsError` unless this machine can read the weights in `folder`."""
        tensor_shapes(Path(folder))

    def rollq_load(self, folder: str, copies: Mapping[str, str]) -> None:
        """Load all tensors of `folder`, and those named by the keys of `copies` once more, under the values.

        vLLM loads a tied head only under a name of its own. Without it, a kernel that packs its weights (on the CPU)
        goes on with those of before, and vLLM says nothing.
        """
        self.rollq_check(folder)  # a reload that fails half-way kills vLLM at its next step
        self.reload_weights(weights_iterator=_tensors(Path(folder), copies))


def _tensors(folder: Path, copies: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The tensors of `folder`, one at a time: no more of them is in memory."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                yield name, tensor
                if name in copies:
                    yield copies[name], tensor

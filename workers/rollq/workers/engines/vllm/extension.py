"""Methods that rollq adds to vLLM's worker processes to load weights into the running model."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rollq.buffer.weights.bit_sums import COMPARABLE, bit_sums
from rollq.buffer.weights.manifest import weight_files
from rollq.workers.engines.tensors import read_tensors

EXPERTS = (
    (re.compile(r"\.experts\.(routed_experts\.)?w13_weight$"), ".experts.gate_up_proj"),
    (re.compile(r"\.experts\.(routed_experts\.)?w2_weight$"), ".experts.down_proj"),
)
"""vLLM's names for a layer's experts -> transformers' names in memory."""


class LoadExtension:
    """Mixed into vLLM's worker, whose methods it calls."""

    model_config: Any
    scheduler_config: Any
    get_model: Any
    reload_weights: Any
    weight_transfer_engine: Any
    init_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def rollq_dtype(self) -> str:
        """torch's name of the forward pass's dtype, or the quantization's name."""
        return str(self.model_config.quantization or self.model_config.dtype).removeprefix("torch.")

    def rollq_max_sequences(self) -> int:
        """The number of sequences that the server runs concurrently."""
        return int(self.scheduler_config.max_num_seqs)

    def rollq_check(self, folder: str) -> None:
        """Raise `WeightsError` unless this machine can read the weights in `folder`."""
        read_tensors(Path(folder))

    def rollq_bit_sums(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The sums of this rank's parameters, under transformers' names; see `BitSums`.

        The order of values does not matter, so experts packed for a kernel keep their sums. Other parameters that vLLM
        fuses have different names.
        """
        held = bit_sums(self.get_model(), COMPARABLE)
        return {_in_transformers(name): (summed.shape, summed.sums) for name, summed in held.items()}

    def rollq_load(self, folder: str, copies: Mapping[str, str]) -> None:
        """Load all tensors in `folder`. Load each tensor that is a key of `copies` a second time, under the key's
        value.

        vLLM loads a tied head only under a separate name. Without that load, a kernel that packs its weights (on the
        CPU) silently keeps the old weights. Models without a separate head ignore the copy.
        """
        self.rollq_check(folder)  # a reload that fails half-way kills vLLM at its next step
        model = self.get_model()
        modules = {name.rpartition(".")[2] for name, _ in model.named_modules(remove_duplicate=False)}
        wanted = {name: head for name, head in copies.items() if head.removesuffix(".weight") in modules}
        if next(model.parameters()).device.type == "cpu":
            _pack_experts_anew(model)
        self.reload_weights(weights_iterator=_tensors(Path(folder), wanted))

    def rollq_reload(self, folder: str, copies: Mapping[str, str]) -> None:
        """Load the weights in `folder`, erase all parameters that vLLM reports as loaded, and load them again.

        For some models, vLLM's reload silently loads nothing. The models' parameters then stay erased, which shows the
        fault.
        """
        loaded: set[str] = set()
        model = self.get_model()
        load_weights = model.load_weights

        def noting(weights: Any) -> Any:
            loaded.update(names := load_weights(weights) or ())
            return names

        model.load_weights = noting
        try:
            self.rollq_load(folder, copies)
        finally:
            del model.load_weights
        for name, parameter in model.named_parameters():
            if name in loaded:
                parameter.data.zero_()
        self.rollq_load(folder, copies)

    def rollq_receive(self, init_info: dict[str, Any], update_info: dict[str, Any]) -> None:
        """Join the trainer in a new process group, and load the weights that the trainer sends by vLLM's weight
        transfer."""
        self.init_weight_transfer_engine(init_info)
        try:
            if getattr(getattr(self.weight_transfer_engine, "model_update_group", None), "disabled", False):
                raise RuntimeError("vLLM found no NCCL library, so it would load arbitrary memory as weights")
            self.start_weight_update()
            self.update_weights(update_info)
            self.finish_weight_update()
        finally:
            self.weight_transfer_engine.shutdown()


def _in_transformers(name: str) -> str:
    for pattern, other in EXPERTS:
        name = pattern.sub(other, name)
    return name


def _pack_experts_anew(model: Any) -> None:
    """Make vLLM pack experts' weights for the CPU on every load. By default, vLLM packs them only for a new kernel."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.process_weights_after_loading = partial(_with_new_kernel, method)


def _with_new_kernel(method: Any, layer: Any) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def _tensors(folder: Path, copies: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The tensors of `folder`, with only one in memory at a time."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                yield name, tensor
                if name in copies:
                    yield copies[name], tensor

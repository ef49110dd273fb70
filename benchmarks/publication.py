"""Peak memory of rank 0 while it writes a model that FSDP2 shards over two ranks: as a whole, and tensor by tensor.
Each method runs in two new processes, over gloo.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import Result, ratios, take_turns

RANKS = 2
LAYERS, QUICK_LAYERS = 6, 1
VOCABULARY, HIDDEN = 32_000, 1024
TARGET = 0.5
MB = 1_000_000


def measure(quick: bool) -> list[Result]:
    """Two results: the memory and time of writing tensor by tensor, relative to writing the whole model at once."""
    layers, repetitions = (QUICK_LAYERS, 1) if quick else (LAYERS, 5)
    found: dict[str, list[list[float]]] = {"whole": [], "streamed": []}

    def side(way: str) -> float:
        found[way].append(_run(way, layers))
        return found[way][-1][0]

    whole, streamed = take_turns(repetitions, lambda: side("whole"), lambda: side("streamed"))
    _, _, size, largest = found["whole"][0]
    what = f"a model of {size:.0f} MB on {RANKS} ranks, written tensor by tensor"
    details = {
        "whole_mb": sorted(whole)[len(whole) // 2],
        "streamed_mb": sorted(streamed)[len(streamed) // 2],
        "largest_tensor_mb": largest,
    }
    slower = [one[1] / other[1] for one, other in zip(found["streamed"], found["whole"], strict=True)]
    return [
        Result(
            "publication-memory",
            f"{what}: peak memory of rank 0, of that with the whole model gathered",
            "x",
            TARGET,
            "lower",
            ratios(streamed, whole),
            details,
        ),
        Result(
            "publication-time", f"{what}: time, of that with the whole model gathered", "x", 1.5, "lower", tuple(slower)
        ),
    ]


def _run(way: str, layers: int) -> list[float]:
    """The numbers that rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.publication", way, str(layers), folder]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
        texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank failed: {[rank.returncode for rank in ranks]}")
    return [float(word) for word in texts[0].split()]


def main() -> None:
    """Print the growth of this rank's peak memory in MB, the seconds, and the MB of the model and of a tensor."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollq.consumer.settings import MAX_FILE_BYTES
    from rollq.consumer.trainer.sharding import shard
    from rollq.consumer.weights.checkpoint_format import model_stream
    from rollq.consumer.weights.model_folders import write_model

    way, layers, folder, rank = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=8, head_dim=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    shard(model, world_size=RANKS, device="cpu", compute_dtype=None)
    stream = model_stream(model)
    size, largest = stream.size_bytes, max(tensor.nbytes for tensor in stream.described.values())
    dist.barrier()
    before, started = _reset_peak(), time.perf_counter()
    if rank != 0:
        stream.take_part()
    elif way == "whole":
        (folder / "model.safetensors").write_bytes(save(dict(stream)))
    else:
        write_model(folder, stream, max_file_bytes=MAX_FILE_BYTES)
    seconds, peak = time.perf_counter() - started, _peak()
    dist.barrier()
    if rank == 0:
        print((peak - before) / MB, seconds, size / MB, largest / MB, flush=True)
    os._exit(0)  # closing the group may abort a rank whose peer has ended


def _reset_peak() -> int:
    """Begin a new peak of this process's memory (Linux); returns the bytes that it begins with."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The largest resident memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main()

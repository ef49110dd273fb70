"""Peak memory and time of the logprobs of 2,048 tokens with a vocabulary of 49,152, and of their gradients.

Each method runs in a process, with a tiny model that has a large head.
"""

import resource
import subprocess
import sys
import time

from benchmarks.results import Result, ratios, take_turns

TOKENS, VOCABULARY, HIDDEN = 2048, 49_152, 64
QUICK_VOCABULARY = 4096
CHUNK = 256
TARGET = 0.35


def measure(quick: bool) -> list[Result]:
    """Two results: memory and time of chunks, as shares of the cost of all logits at once."""
    vocabulary, repetitions = (QUICK_VOCABULARY, 1) if quick else (VOCABULARY, 5)
    found: dict[int, list[tuple[float, float]]] = {0: [], CHUNK: []}

    def side(chunk: int) -> float:
        command = [sys.executable, "-m", "benchmarks.logprobs", str(chunk), str(vocabulary)]
        grown, seconds = map(float, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
        found[chunk].append((grown, seconds))
        return grown

    plain, chunked = take_turns(repetitions, lambda: side(0), lambda: side(CHUNK))
    slower = [few[1] / whole[1] for few, whole in zip(found[CHUNK], found[0], strict=True)]
    what = f"logprobs of {TOKENS:,} tokens x {vocabulary:,}, {CHUNK} at a time"
    details = {"plain_mib": sorted(plain)[len(plain) // 2], "chunked_mib": sorted(chunked)[len(chunked) // 2]}
    return [
        Result(
            "logprobs-memory",
            f"{what}: peak memory, of that with all at once",
            "x",
            TARGET,
            "lower",
            ratios(chunked, plain),
            details,
        ),
        Result("logprobs-time", f"{what}: time, of that with all at once", "x", 2.0, "lower", tuple(slower)),
    ]


def main() -> None:
    """Print the growth of the peak memory in MiB, and the seconds of the second of two passes."""
    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollq.buffer.values.rollouts import FinishReason, Group, Prompt, Sample, SampleStatus, Segment, VersionSpan
    from rollq.consumer import Batch
    from rollq.consumer.objective.token_logprobs import token_logprobs

    chunk, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=TOKENS + 1,
        )
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(vocabulary, size=TOKENS, dtype=np.int32)
    segment = Segment(ids[:1], ids, np.zeros(TOKENS, np.float32), (VersionSpan(1, 0, TOKENS),))
    sample = Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, 1.0)
    micro = Batch.build(1, [Group("task", 1, Prompt("p"), (sample,), 0, 1, 1)]).to_torch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        started = time.perf_counter()
        token_logprobs(model, micro, chunk=chunk).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - started
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds)


if __name__ == "__main__":
    main()

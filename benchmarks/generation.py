"""Model, prompts and limits that both sides of the throughput benchmark share."""

from pathlib import Path
from typing import Any

import orjson

from benchmarks.world import QUESTION

GROUP_SIZE = 8
IN_FLIGHT = 32
MAX_TOKENS = 256
EOS_IDS = (1, 2, 3, 4)
"""One token in 64 ends an answer, so that groups differ in length and do not end together."""
TEMPERATURE = 1.0
ENGINE_ARGS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20, "max_num_seqs": 256}


def write_files(folder: Path) -> None:
    """Write the model and the prompts into `folder`."""
    from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save  # torch: the other benchmarks do without

    model = make_model(258, 0, head_dim=32)
    model.generation_config.eos_token_id = list(EOS_IDS)
    save(folder / "model", model, make_tokenizer())
    prompts = ({"prompt": f"{number}. {QUESTION.format(number % 97)}", "answer": number} for number in range(20_000))
    (folder / "prompts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, prompts)))

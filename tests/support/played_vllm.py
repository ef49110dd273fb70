"""A real vLLM on the CPU that plays a part: a test says what it answers, and it makes these tokens as any others.

The model is a random Qwen3 with the chat template of its family and a small tokenizer of its own.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollq.buffer.values.rollouts import Sample
from rollq.workers.engines.vllm.engine import VllmEngine, VllmSettings
from rollq.workers.engines.vllm.process import VllmProcess
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_families import OF_VLLM, template_of
from support.chosen_draws import OPEN
from support.documented_commands import ROOT
from support.vllm_run import TOLERANCE, forward_logprobs, make_qwen3

ANSWER = "<|im_start|>assistant\n"
FAMILY = OF_VLLM["Qwen3, thoughts apart"]
SPECIAL = ("<|endoftext|>", *(token for token in FAMILY.tokens if token != "<|endoftext|>"))
VOCABULARY = 4096
CONTEXT_TOKENS = 65_536
CACHE_BYTES = 256 << 20
TEMPERATURE = 0.7

Words = Sequence[str | int]
"""An answer: texts, and between them numbers of tokens that the model draws itself. The end of the turn follows."""


def make_model(folder: Path) -> Path:
    """The model, in `folder`. Its tokenizer knows the words of rollq's pages and of the requests of agents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*(ROOT / "docs").glob("*/*.md"), *(ROOT / "tests" / "data" / "gateway").glob("*.json")]
    tokenizer.train(list(map(str, texts)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=FAMILY.end, pad_token=SPECIAL[0], model_max_length=CONTEXT_TOKENS
    )
    fast.chat_template = template_of(FAMILY.template)
    end = fast.convert_tokens_to_ids(FAMILY.end)
    make_qwen3(folder, 3, vocab_size=len(fast), max_position_embeddings=CONTEXT_TOKENS, eos_token_id=end)
    fast.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Served:
    """One request as vLLM got and answered it: the ids of its prompt, and those that it made."""

    prompt: Sequence[int]
    made: Sequence[int]


@dataclass
class Play:
    """The part that the model plays now: it answers with the first of `words` whose key is in what follows the last
    answer of a prompt. `served` is what vLLM has served since then, `said` counts the keys, and `unknown` is what there
    are no words for."""

    words: Mapping[str, Words]
    served: list[Served] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)

    def answer(self, prompt: str) -> Words:
        """What the model answers to a prompt."""
        asked = prompt.rpartition(ANSWER)[0].rpartition(ANSWER)[2]
        for key, words in self.words.items():
            if key in asked:
                self.said[key] += 1
                return words
        self.unknown.append(asked)
        return ()


class PlayedVllm(VllmEngine):
    """Engine `vllm`, whose answers are those of its `play`."""

    def __init__(self, model: Path) -> None:
        arguments = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "max_num_seqs": 8,
            "logits_processors": ["support.chosen_draws:ChosenDraws"],
        }
        super().__init__(VllmSettings(model=model, dtype="float32", engine_args=arguments))
        self.model, self.tokenizer = model, HfTokenizer(model)
        self.play: Play | None = None
        self._end = self.tokenizer.encode(FAMILY.end)

    async def _start_process(self, settings: VllmSettings) -> VllmProcess:
        process = await super()._start_process(settings)
        generate = process.llm.generate

        async def played(prompt: Any, parameters: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            play, ids = self.play, prompt["prompt_token_ids"]
            if play is not None:
                text = self.tokenizer.decode(ids, special=True)
                parameters.extra_args = {"draws": self._draws(play.answer(text)), "least": len(SPECIAL)}
            async for answer in generate(prompt, parameters, *args, **kwargs):
                yield answer
            if play is not None:
                play.served.append(Served(list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)))

        process.llm.generate = played
        return process

    def _draws(self, words: Words) -> list[int]:
        draws: list[int] = []
        for each in words:
            draws += [OPEN] * each if isinstance(each, int) else self.tokenizer.encode(each)
        return draws + self._end


def check(sample: Sample, play: Play, tokenizer: HfTokenizer, model: Path) -> None:
    """Assert that every segment is what vLLM got and made, token for token, with the logprobs of a plain forward pass,
    and that every token that was made is trained once, or counted as left out."""
    assert not play.unknown, play.unknown
    served = {(tuple(each.prompt), tuple(each.made)) for each in play.served}
    trained = 0
    for segment in sample.segments:
        ids = np.concatenate([segment.prompt_ids, segment.response_ids])
        mask = np.concatenate(
            [np.zeros(len(segment.prompt_ids), np.bool_), np.ones(len(segment.response_ids), np.bool_)]
        )
        if segment.loss_mask is not None:
            mask[len(segment.prompt_ids) :] = segment.loss_mask
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), append=0, prepend=0))
        for start, end in edges.reshape(-1, 2):
            assert (tuple(ids[:start].tolist()), tuple(ids[start:end].tolist())) in served
        again = forward_logprobs(model, ids, TEMPERATURE, attention="sdpa")[len(segment.prompt_ids) - 1 :]
        inside = mask[len(segment.prompt_ids) :]
        np.testing.assert_allclose(again[inside], segment.logprobs[inside], atol=TOLERANCE, rtol=0)
        trained += int(inside.sum())
    calls = sample.extra["calls"]
    assert trained == sum(call["tokens"] for call in calls) - sample.extra.get("left_out_tokens", 0)
    assert sum(call["tokens"] for call in calls) == sum(len(each.made) for each in play.served)
    for each in play.served:
        text = tokenizer.decode(list(each.prompt), special=True)
        if text.count(ANSWER) == 1:  # a history without answers
            assert tokenizer.encode(text) == each.prompt

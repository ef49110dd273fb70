"""Conversations of a family of models through the loops of several turns, and what must hold for each."""

from pathlib import Path

import numpy as np

from rollq.buffer.values.rollouts import Sample, SampleStatus
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model
from support.chat_families import THOUGHT, Family, family_tokenizer, sample_of

TWO_CALLS = (("6*7", 0), ("3*14", 1))


def tool_turns(family: Family) -> list[tuple[str, bool]]:
    """Two turns with a call and the answer, with a thought in each."""
    calls = [(family.thinking(family.calling(value, first=number)), True) for value, number in TWO_CALLS]
    return [*calls, (family.thinking(family.saying("It is 42")), False)]


def check_exact(tokenizer: HfTokenizer, sample: Sample, model: Model) -> None:
    """Every token that the model wrote is in the loss, once and in order, and no other; each request continued exactly
    the tokens of its segment."""
    written = [token for words in model.words for token in words]
    trained: list[int] = []
    contexts = []
    for segment in sample.segments:
        mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
        trained += segment.response_ids[mask].tolist()
        contexts.append([*segment.prompt_ids.tolist(), *segment.response_ids.tolist()])
    assert trained == written
    for request, words in zip(model.requests, model.words, strict=True):
        continued = [*request.prompt_ids.tolist(), *words]
        assert any(context[: len(continued)] == continued for context in contexts)


def check_tools(folder: Path, family: Family) -> None:
    """Two turns with calls and an answer: exact tokens, calls that ran, and as many segments as the family needs."""
    tokenizer = family_tokenizer(folder, family)
    sample, model = sample_of(tokenizer, family, tool_turns(family), "tools", tools={"calculator": {}})
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None)
    check_exact(tokenizer, sample, model)
    assert [message["content"] for message in sample.extra["messages"] if message["role"] == "tool"] == ["42", "42"]
    assert sample.text.endswith("It is 42")
    assert len(sample.segments) == family.segments


def check_second_question(folder: Path, family: Family) -> None:
    """After the answer to the first question, thoughts are in the prompt if the template keeps them."""
    tokenizer = family_tokenizer(folder, family)
    answer = (family.thinking(family.saying("It is 42 too")), False)
    turns = [*tool_turns(family), answer]
    environment = "support.chat_families.Interview"
    parsers = {"tool_parser": "hermes"} if "tool_parser" not in family.parsers else {}
    sample, model = sample_of(tokenizer, family, turns, "environment", environment=environment, **parsers)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None)
    check_exact(tokenizer, sample, model)
    prompts = [tokenizer.decode(request.prompt_ids.tolist(), special=True) for request in model.requests]
    assert "And 7*6?" in prompts[-1]
    assert "It is 42" in prompts[-1]
    if family.thinks:
        assert (THOUGHT in prompts[-1]) == family.kept

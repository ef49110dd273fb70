"""The demo's tiny model: made the same every time, an ordinary model folder, and warmed up on mostly wrong answers."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollq.cli.demo import tiny_model as tiny
from rollq.cli.demo.prompts import prompt_files
from rollq.cli.demo.tiny_model import Question

TASKS = ("sum", "sort")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's prompt files."""
    folder = tmp_path_factory.mktemp("prompts")
    for name, content in prompt_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def train(folder: Path) -> list[Question]:
    return [question for task in TASKS for question in tiny.read_questions(folder / f"{task}.jsonl")]


@pytest.fixture(scope="module")
def heldout(folder: Path) -> dict[str, list[Question]]:
    return {task: tiny.read_questions(folder / f"{task}_heldout.jsonl") for task in TASKS}


def test_the_same_seed_makes_the_same_weights_and_another_seed_others(tmp_path: Path, train: list[Question]) -> None:
    folders = {name: tmp_path / name for name in ("first", "again", "other")}
    for name, folder in folders.items():
        tiny.make_tiny_model(folder, train, {}, seed=int(name == "other"), steps=3, progress=False)
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders.values())
    assert first == again
    assert first != other


def test_the_folder_is_an_ordinary_model_of_a_few_hundred_thousand_parameters(
    tmp_path: Path, train: list[Question]
) -> None:
    tiny.make_tiny_model(tmp_path, train, {}, steps=1, progress=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert 300_000 < model.num_parameters() < 350_000
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_the_warm_up_lowers_the_loss_and_reports_what_it_reached(
    tmp_path: Path, train: list[Question], heldout: dict[str, list[Question]]
) -> None:
    short = tiny.make_tiny_model(tmp_path, train, heldout, steps=2, progress=False)
    longer = tiny.make_tiny_model(tmp_path, train, heldout, steps=30, progress=False)
    assert longer.loss < short.loss - 1
    assert longer.accuracy.keys() == {"sum", "sort"}
    assert all(longer.accuracy[task] > short.accuracy[task] for task in TASKS)


def test_reported_accuracy_is_the_probability_of_the_whole_answer_and_its_end(
    heldout: dict[str, list[Question]],
) -> None:
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(len(tokenizer), seed=0)
    questions = [heldout["sum"][0], heldout["sort"][0]]
    together, tokens = tiny.answer_logprobs(model, questions, tokenizer)
    assert tokens == sum(len(question.answer) + 1 for question in questions)
    for question, found in zip(questions, together.tolist(), strict=True):
        prompt = tokenizer.encode(question.prompt, add_special_tokens=False)
        answer = [*tokenizer.encode(question.answer, add_special_tokens=False), tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].sum()
        assert found == pytest.approx(float(alone.detach()), abs=1e-4)


def test_wrong_answers_keep_the_digits_of_the_right_one() -> None:
    rng = random.Random(0)
    assert tiny.wrong_answer("46", rng) == "64"
    assert tiny.wrong_answer("118", rng) == "811"
    orders = {tiny.wrong_answer("1234", rng) for _ in range(500)}
    assert len(orders) == 24
    assert all(sorted(order) == ["1", "2", "3", "4"] for order in orders)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_whole_warm_up_leaves_the_right_answer_known_but_not_preferred(
    tmp_path: Path, train: list[Question], heldout: dict[str, list[Question]], seed: int
) -> None:
    made = tiny.make_tiny_model(tmp_path, train, heldout, seed=seed, progress=False)
    assert 0.2 < sum(made.accuracy.values()) / 2 < 0.45

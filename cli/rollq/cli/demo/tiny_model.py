"""The demo's tiny model: a real Qwen3 of 0.3 M parameters with a byte-level tokenizer, warmed up so that RL has work.

The warm-up is supervised, on answers that are wrong on purpose in 60 % of cases: afterwards the model knows the right
answer but does not prefer it (about 0.3 of its samples are right), and RL starts from there. The result is an ordinary
Hugging Face model folder; nothing in rollq depends on its size.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

WRONG_ANSWERS = 0.6
STEPS = 600
BATCH = 64
MEASURED_STEPS = 20
LEARNING_RATE = 6e-3
INIT_STD = 0.06
CONTEXT_TOKENS = 4096
PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Question:
    """One row of a prompt file."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WarmUp:
    """The warm-up's result: the last loss in nats per token and, per task, the exact probability of sampling the right
    answer to a held-out prompt at temperature 1."""

    loss: float
    accuracy: dict[str, float]


def read_questions(path: Path) -> list[Question]:
    """Read a prompt file of the demo."""
    return [Question(**orjson.loads(line)) for line in path.read_bytes().splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text encodes and decodes; ids 0 and 1 are <pad> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=CONTEXT_TOKENS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(vocabulary: int, seed: int, head_dim: int = 16) -> Qwen3ForCausalLM:
    """An untrained Qwen3: 2 layers, hidden size 128, tied embeddings. vLLM on the CPU needs a `head_dim` of 32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=128 // head_dim,  # eight small heads learn to add much sooner than four larger ones
            num_key_value_heads=64 // head_dim,
            head_dim=head_dim,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=INIT_STD,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def wrong_answer(answer: str, rng: random.Random) -> str:
    """The answer's digits in a wrong order: reversed for a sum, shuffled for sorted digits."""
    return "".join(rng.sample(answer, len(answer))) if len(answer) >= 4 else answer[::-1]


def sometimes_wrong(question: Question, rng: random.Random) -> Question:
    """The question, with a wrong answer in 60 % of cases."""
    return Question(question.prompt, wrong_answer(question.answer, rng)) if rng.random() < WRONG_ANSWERS else question


def encode(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids of questions with their answers: `ids`, `targets`, `mask`, each [B, T].

    `ids` int64 is right padded; `targets` int64 holds the next tokens; `mask` bool is True where the target belongs to
    the answer or its <eos>. Causal attention never looks right, so padding needs no attention mask.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts = [tokenizer.encode(question.prompt, add_special_tokens=False) for question in questions]
    answers = [[*tokenizer.encode(question.answer, add_special_tokens=False), eos] for question in questions]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    rows = torch.full((len(questions), width), pad)
    mask = torch.zeros((len(questions), width), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        rows[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : len(prompt) + len(answer)] = True
    return rows[:, :-1], rows[:, 1:], mask[:, 1:]


def answer_logprobs(
    model: Qwen3ForCausalLM, questions: Sequence[Question], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, int]:
    """Log probability of each answer with its <eos>, float32 [B] in nats, and the number of answer tokens."""
    ids, targets, mask = encode(questions, tokenizer)
    logprobs = -functional.cross_entropy(model(input_ids=ids).logits.transpose(1, 2), targets, reduction="none")
    return (logprobs * mask).sum(dim=1), int(mask.sum())


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    *,
    seed: int,
    steps: int,
    progress: bool,
    lesson: Callable[[Question, random.Random], Question] = sometimes_wrong,
    measured: Callable[[float], None] = lambda _: None,
) -> float:
    """Train on the questions that `lesson` makes from `questions`, by default with 60 % wrong answers; returns the last
    loss in nats per token. Soon after the start, `measured` gets the seconds that all steps will take."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    loss = torch.tensor(float("nan"))
    bar = tqdm(range(steps), desc="warm-up", unit="step", disable=not progress)
    started_s = time.monotonic()
    for step in bar:
        if step == MEASURED_STEPS:
            measured((time.monotonic() - started_s) / step * steps)
        batch = [lesson(question, rng) for question in rng.sample(questions, BATCH)]
        logprobs, tokens = answer_logprobs(model, batch, tokenizer)
        loss = -logprobs.sum() / tokens
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
    return float(loss.detach())


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a Hugging Face model folder."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny_model(
    folder: Path,
    train: Sequence[Question],
    heldout: Mapping[str, Sequence[Question]],
    *,
    seed: int = 0,
    steps: int = STEPS,
    progress: bool = True,
    measured: Callable[[float], None] = lambda _: None,
) -> WarmUp:
    """Train a model into `folder`; the same arguments give the same weights. `heldout` maps tasks to questions.
    `measured` is passed to `warm_up`."""
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed)
    loss = warm_up(model, tokenizer, train, seed=seed, steps=steps, progress=progress, measured=measured)
    with torch.no_grad():
        accuracy = {
            task: float(answer_logprobs(model, questions, tokenizer)[0].exp().mean())
            for task, questions in heldout.items()
        }
    save(folder, model, tokenizer)
    return WarmUp(loss, accuracy)

"""Feeds hostile inputs to everything that reads bytes of another process, of a file or of a server.

A decoder may return something sound or raise the errors that it documents. Any other exception is a crash, and a
result that is not sound was wrongly accepted.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import redis
import xxhash

from faults.findings import Tally
from faults.fuzz_codec import any_frame, any_group, check_same_arguments, check_same_samples
from faults.fuzz_deltas import hostile_delta, refuse_delta
from faults.mutations import mutate_bytes, mutate_json
from rollq.buffer.errors import (
    ConfigError,
    CorruptFrame,
    InvalidPrompt,
    QueryError,
    SnapshotError,
    TicketRefused,
    WeightsError,
)
from rollq.buffer.query.language import parse_query
from rollq.buffer.snapshots.folder import INDEX, read_index
from rollq.buffer.store.redis_url import check_url
from rollq.buffer.tickets import TicketJob, TicketSerializer
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    WHOLE,
    FinishReason,
    Lease,
    Prompt,
    Sample,
    SamplePart,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.weights.broadcast_log import apply_entry, first_entry
from rollq.buffer.weights.manifest import Manifest
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.frame_format import FRAME_VERSION, MAGIC, PREFIX
from rollq.buffer.wire.group_fields import decode_group
from rollq.buffer.wire.parts import decode_parts, encode_part
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from rollq.cli.settings.file import load_settings
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import PromptSettings
from rollq.workers.engines.openai.completions_api import choose_model, read_completion, read_fingerprint
from rollq.workers.engines.protocol import WeightsVersion

Make = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Target:
    """A decoder. `make` draws a hostile input; `decode` raises `errors` for it, or `AssertionError` if it should have.

    `share` is the number of inputs of this target for each input of the slowest target.
    """

    name: str
    make: Make
    decode: Callable[[Any], object]
    errors: tuple[type[Exception], ...]
    share: int = 1


def judge(target: Target, given: Any) -> tuple[str, str]:
    """The verdict on what the decoder makes of an input, and what is wrong with it, if anything is."""
    try:
        target.decode(given)
    except target.errors:
        return "refused", ""
    except AssertionError as error:
        return "wrongly accepted", str(error)
    except Exception as error:  # noqa: BLE001 - every other exception is what fuzzing looks for
        return "crash", f"{type(error).__name__}: {error}"
    return "accepted", ""


def fuzz(target: Target, seed: int, count: int) -> Tally:
    """Give `count` inputs to a decoder."""
    rng, tally = random.Random(f"{seed} {target.name}"), Tally(target.name)
    for _ in range(count):
        given = target.make(rng)
        verdict, message = judge(target, given)
        tally.add(verdict, given, message)
    return tally


# -- what comes from Redis ---------------------------------------------------------------------------------------------


def _sample(rng: random.Random) -> Sample:
    tokens = rng.randint(0, 6)
    segment = Segment(
        prompt_ids=np.arange(rng.randint(1, 3), dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        versions=(VersionSpan(1, 2, tokens),) if tokens else (),
        loss_mask=np.ones(tokens, dtype=np.bool_) if rng.random() < 0.5 else None,
        arrays={"experts": np.zeros((tokens, 2), dtype=np.int16)} if rng.random() < 0.3 else {},
    )
    return Sample(
        (segment,),
        SampleStatus.COMPLETED,
        FinishReason.STOP,
        1.0,
        text="text",
        sampling={"temperature": 0.7},
        extra={"seed": rng.randint(0, 1)},
    )


def _frame(rng: random.Random) -> bytes:
    return encode_samples([_sample(rng) for _ in range(rng.randint(1, 3))])


def _changed_frame(rng: random.Random) -> bytes:
    frame = _frame(rng)
    changed = mutate_bytes(rng, frame)
    return frame[:-1] if changed == frame else changed


def _forged_frame(rng: random.Random) -> bytes:
    """A frame whose body was changed and whose length and checksum were made to fit."""
    body = mutate_bytes(rng, encode_samples([_sample(rng), _sample(rng)])[PREFIX.size :])
    return PREFIX.pack(MAGIC, FRAME_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _read_frame(frame: bytes) -> None:
    samples = decode_samples(frame)
    assert all(isinstance(sample, Sample) for sample in samples)


def _read_group(stored: dict[str, bytes]) -> None:
    samples = decode_group(stored, group_size=2)
    assert len(list(samples)) == 2


def _payload(rng: random.Random) -> dict[str, bytes]:
    """The fields of a group of two samples, of which some are missing, too many, or of another kind."""
    frames = [_frame(rng) for _ in range(3)]
    fields = rng.sample([WHOLE, "0", "1", "2", "3"], rng.randint(0, 3))
    return dict(zip(fields, frames, strict=False))


def _changed_part(rng: random.Random) -> bytes:
    lease = Lease("math", 1, 1, "nonce", 1, Prompt("x"), (EMPTY_SAMPLE,), 1)
    return mutate_bytes(rng, encode_part(SamplePart(lease, 0, 0, rng.randint(0, 3), _sample(rng))))


def _part(raw: bytes) -> None:
    decode_parts(0, {1: raw}, group_size=1)


def _refuse_frame(frame: bytes) -> None:
    list(decode_samples(frame))
    raise AssertionError("a changed frame was decoded")


def _check_prompt(data: bytes) -> None:
    prompt = decode_prompt(data)
    try:
        encode_prompt(prompt)
    except InvalidPrompt as error:
        raise AssertionError(f"an invalid prompt was decoded: {error}") from None


PROMPT = orjson.loads(encode_prompt(Prompt("what is 1 + 1?", answer="2", ids=(1, 2), metadata={"level": 1})))
TENSORS = {"w": {"dtype": "F32", "shape": [2, 2]}}
FILES = {"model.safetensors": {"bytes": 10, "sha256": "00", "edges": "00"}}
MANIFEST = {"schema": 1, "kind": "model", "files": FILES, "tensors": TENSORS}
ROUND = {"tensors": [["w", "F32", [2, 2]]], "join_s": 1.0, "timeout_s": 2.0}
ENTRIES = [
    {"attempt": 1, "ready": "worker", "ranks": 1}, {"attempt": 1, "members": {"worker": 1}, "meeting": {"port": 1}},
    {"attempt": 1, "took": "worker"}, {"attempt": 1, "broken": "worker", "error": "it"}, {"attempt": 1, "over": "done"},
    {"attempt": 2, "opened": True}, {"late": "worker"},
]  # fmt: skip
TICKET: list[Any] = ["rollq.generate", None, [], {"run": "gsm8k", "groups": 8}]


def _changed_broadcast(rng: random.Random) -> tuple[bytes, bytes]:
    """The entry that opens a broadcast, changed or not, and a changed one that follows."""
    first = _json(ROUND)(rng) if rng.random() < 0.5 else orjson.dumps(ROUND)
    return first, _json(rng.choice(ENTRIES))(rng)


def _broadcast(given: tuple[bytes, bytes]) -> None:
    first, then = given
    apply_entry(first_entry(first), then)


def _ticket(data: bytes) -> None:
    job = TicketJob("job", connection=redis.Redis(), serializer=TicketSerializer)  # never connected
    job.data = data
    ticket = job.ticket("gsm8k")
    assert ticket.run == "gsm8k", ticket
    assert isinstance(ticket.groups, int), ticket


# -- files and servers -------------------------------------------------------------------------------------------------

ROW = {"prompt": [{"role": "user", "content": "hi"}], "answer": "2", "prompt_ids": [1, 2], "level": 1}
QUERY: dict[str, Any] = {
    "task": "math", "status": {"$in": ["completed", "aborted"]}, "reward": {"$between": [0, 1], "$ne": 0.5},
    "$or": [{"tries": 1}, {"staleness": {"$gte": 1}}],
}  # fmt: skip
COMPLETION = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5}]}}
ANSWER = {"choices": [{**COMPLETION, "finish_reason": "stop"}]}
MODELS = {"data": [{"id": "model", "max_model_len": 4096}]}
URL = b"rediss://user:password@localhost:6379/0?socket_timeout=1"
SETTINGS = b"""run = "sums"
[redis]
buffer_url = "redis://127.0.0.1:6379/0"
[tasks.sum]
prompts = "sum.jsonl"
batch_groups = 32
batches.schedule = [[100, 48]]
[producer]
strategy = "async"
[worker]
engine = "simulated"
"""
INDEX_BODY = {"schema": 1, "run": "sums", "tasks": {"sum": {"statuses": {"completed": 1}}}, "files": [], "digest": "00"}


def _json(value: Any) -> Make:
    """Changed values, and changed bytes, of a JSON document."""

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(rng, orjson.dumps(value))
        return json.dumps(mutate_json(rng, value)).encode()

    return make


def _values(value: Any) -> Make:
    return lambda rng: mutate_json(rng, value)


def _completion(answer: Any) -> None:
    found = read_completion(answer, WeightsVersion(1, 2, ""))
    assert len(found.ids) == len(found.logprobs), found
    assert np.isfinite(found.logprobs).all(), found


def _fingerprint(answer: Any) -> None:
    assert np.isfinite(read_fingerprint(answer)).all(), answer


def file_targets(folder: Path) -> Iterator[Target]:
    """Decoders that read files, which they are given in `folder`."""

    def prompts(data: bytes) -> None:
        path = folder / "prompts.jsonl"
        path.write_bytes(data)
        with PromptFile(PromptSettings(prompts=path)) as file:
            for row in range(file.rows):
                encode_prompt(file.prompt(row))

    def settings(data: bytes) -> None:
        path = folder / "rollq.toml"
        path.write_bytes(data)
        load_settings(path, {})

    def index(data: bytes) -> None:
        (folder / INDEX).write_bytes(data)
        read_index(folder)
        raise AssertionError("an index without its digest was read")

    yield Target("prompts file", _json(ROW), prompts, (ConfigError, InvalidPrompt), share=4)
    yield Target("rollq.toml", lambda rng: mutate_bytes(rng, SETTINGS), settings, (ConfigError,))
    yield Target("weights delta", hostile_delta, lambda given: refuse_delta(given, folder), (WeightsError,), share=20)
    yield Target("snapshot index", _json(INDEX_BODY), index, (SnapshotError,), share=4)


def targets(folder: Path) -> list[Target]:
    """Every decoder."""
    return [
        Target("frame, changed", _changed_frame, _refuse_frame, (CorruptFrame,), share=40),
        Target("frame, forged", _forged_frame, _read_frame, (CorruptFrame,), share=40),
        Target("frame, both codecs", any_frame, check_same_samples, (CorruptFrame,), share=40),
        Target("put, both codecs", any_group, check_same_arguments, (), share=20),
        Target("payload of a group", _payload, _read_group, (CorruptFrame,), share=40),
        Target(
            "salvaged part",
            _changed_part,
            lambda raw: decode_parts(0, {1: raw}, group_size=1),
            (CorruptFrame,),
            share=40,
        ),
        Target("stored prompt", _json(PROMPT), _check_prompt, (CorruptFrame,), share=40),
        Target("weights manifest", _json(MANIFEST), Manifest.decode, (WeightsError,), share=20),
        Target(
            "weight broadcast",
            _changed_broadcast,
            _broadcast,
            (WeightsError,),
            share=20,
        ),
        Target("ticket", _json(TICKET), _ticket, (TicketRefused,), share=20),
        Target("query", _values(QUERY), parse_query, (QueryError,), share=20),
        Target("engine's answer", _values(ANSWER), _completion, (ValueError,), share=20),
        Target("engine's fingerprint", _values(ANSWER), _fingerprint, (ValueError,), share=20),
        Target("engine's models", _values(MODELS), lambda listed: choose_model(listed, None), (ValueError,), share=20),
        Target("server URL", lambda rng: mutate_bytes(rng, URL).decode("latin-1"), check_url, (ConfigError,), share=20),
        *file_targets(folder),
    ]


def fuzz_decoders(seed: int, count: int, folder: Path) -> Iterator[Tally]:
    """Give every decoder its share of `count` inputs."""
    chosen = targets(folder)
    total = sum(target.share for target in chosen)
    for target in chosen:
        yield fuzz(target, seed, max(1, count * target.share // total))

"""Encodes plain groups with one compiled pass; see `rollq.buffer.wire.compiled`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import orjson

from rollq.buffer.values.rollouts import Sample, SampleStatus
from rollq.buffer.values.sample_numbers import sample_numbers
from rollq.buffer.wire import compiled
from rollq.buffer.wire.frame_encoding import encode_details, pack
from rollq.buffer.wire.joined_frame import Pieces

_LAYOUT: Final = b'{"prompts":%b,"samples":[%b,%b,[%b],%b],"segments":[%b],"references":{}}'


@lru_cache(maxsize=16)
def _statuses(count: int) -> bytes:
    return orjson.dumps([SampleStatus.COMPLETED] * count)


class PlainGroup(NamedTuple):
    """A plain group as it is sent. `rollq.buffer.wire.sample_rows` describes `rows`, and `sample_outcomes` describes
    `outcomes`. `rewards` and `tokens` have a value for each sample. For each (epoch, version) that made tokens,
    `loss_tokens` has these two numbers and each sample's token count.
    """

    frame: Pieces
    rows: bytes
    outcomes: bytes
    rewards: list[float]
    tokens: list[int]
    loss_tokens: list[tuple[int, ...]]


def encode_plain(samples: Sequence[Sample]) -> PlainGroup | None:
    """Check and encode a plain group; None for any other group, and for every group if nothing was compiled."""
    scan = compiled.scan(samples)
    if scan is None:
        return None
    rewards = orjson.dumps(scan.rewards)
    layout = _LAYOUT % (
        orjson.dumps(scan.prompt_lengths),
        _statuses(len(samples)),
        rewards,
        scan.reasons,
        orjson.dumps(scan.temperatures),
        scan.segments,
    )
    details = encode_details(samples, scan.empty_details)
    _, parts = pack(
        [
            ("prompts", "I32", [scan.prompt_tokens], 4 * scan.prompt_tokens, scan.prompts),
            ("ids", "I32", [scan.response_tokens], 4 * scan.response_tokens, scan.ids),
            ("logprobs", "F32", [scan.response_tokens], 4 * scan.response_tokens, scan.logprobs),
            ("layout", "U8", [len(layout)], len(layout), [layout]),
            ("details", "U8", [len(details)], len(details), [details]),
        ]
    )
    numbers = b"," + orjson.dumps(numbers) if scan.has_numbers and (numbers := sample_numbers(samples)) else b""
    return PlainGroup(
        Pieces(parts),
        b"[%b,[%b],%b,[]%b]" % (rewards, scan.lengths, orjson.dumps(scan.loss_tokens), numbers),
        b"[%b,%b,[%b],{},{}]" % (rewards, orjson.dumps(scan.tokens), scan.reasons),
        scan.rewards,
        scan.tokens,
        scan.loss_tokens,
    )

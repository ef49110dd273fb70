"""Stop strings of which an interrupted response holds the beginning."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollq.buffer.values.rollouts import FinishReason, Int32Array, VersionSpan
from rollq.workers.agents.stop_strings import cut_at_stop_string
from rollq.workers.engines.protocol import Completion
from rollq.workers.tokenizers.byte import EOS_ID, ByteTokenizer


def ids(text: bytes) -> Int32Array:
    return np.array(list(text), np.int32)


def completion(text: bytes) -> Completion:
    """Its first two tokens are of version 3, the rest of version 4."""
    tokens = len(text)
    spans = (VersionSpan(1, 3, 2), VersionSpan(1, 4, tokens - 2))
    logprobs = -np.arange(tokens, dtype=np.float32)
    arrays = {"routed": np.arange(2 * tokens, dtype=np.uint8).reshape(tokens, 2)}
    return Completion(ids(text), logprobs, spans, FinishReason.LENGTH, arrays)


@pytest.mark.parametrize(
    ("prefix", "new", "stop", "kept"),
    [
        (b"it is 42</ans", b"wer> and so on", ["</answer>"], b"wer>"),
        (b"it is 42</answer", b"> and so on", ["nothing", "</answer>"], b">"),
        (b"it is 42", b"</answer> and so on", ["</answer>"], None),  # the engine's to find
        (b"<", b"/answer", ["</answer>"], None),
        (b"it is 42</ans", b"hello, wer>", ["</answer>"], None),
        (b"aaa", b"bb", ["bb"], None),
        (b"aaa", b"bb", ["ab"], b"b"),
        (b"aaa", b"bb", [], None),
        ("twenty €".encode()[:-1], "twenty €!".encode()[-2:], ["€!"], None),  # the character is the engine's, too
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string_begun_before_it(
    prefix: bytes, new: bytes, stop: Sequence[str], kept: bytes | None
) -> None:
    given = completion(new)
    ended = cut_at_stop_string(ids(prefix), given, stop, ByteTokenizer())
    if kept is None:
        assert ended is given
        return
    count = len(kept)
    assert bytes(ended.ids.tolist()) == kept
    assert ended.finish_reason is FinishReason.STOP
    assert ended.logprobs.tolist() == given.logprobs[:count].tolist()
    assert ended.arrays["routed"].tolist() == given.arrays["routed"][:count].tolist()
    expected = [(3, min(2, count))] + ([(4, count - 2)] if count > 2 else [])
    assert [(span.version, span.tokens) for span in ended.versions] == expected


def test_nothing_new_is_nothing_new() -> None:
    nothing = Completion(ids(b""), np.zeros(0, np.float32), (), FinishReason.ABORT)
    assert cut_at_stop_string(ids(b"</ans"), nothing, ["</answer>"], ByteTokenizer()) is nothing
    over = completion(bytes([*b"wer", EOS_ID]))
    assert cut_at_stop_string(ids(b"</ans"), over, ["</answer>"], ByteTokenizer()) is over

"""The trained segments of a session's calls. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollq.buffer.values.rollouts import Float32Array, Segment
from rollq.workers.gateway.sessions.call_nodes import Node


def trained_segments(nodes: Sequence[Node]) -> tuple[Segment, ...]:
    """The segments of all answers to train, thread by thread. Left-out answers that other calls continue are outside
    the loss."""
    return tuple(segment for thread in _trained_threads(nodes) for segment in _trained(thread))


def segment_numbers(nodes: Sequence[Node]) -> dict[int, int]:
    """The number of each trained call -> the index in `trained_segments` of the segment with the call's tokens."""
    numbers: dict[int, int] = {}
    before = 0
    for thread in _trained_threads(nodes):
        segments = _trained_places(thread)
        places = {old: before + new for new, old in enumerate(segments)}
        for node in thread:
            if node.left_out is None and node.tokens:
                numbers[node.number] = places[node.end.closed]
        before += len(segments)
    return numbers


def token_rewards(nodes: Sequence[Node], rewards: Mapping[int, float]) -> Float32Array:
    """The rewards float32 [R] of the response tokens in `trained_segments`. Each trained answer's last token gets its
    call's reward.
    """
    parts = [np.zeros(0, np.float32)]
    for thread in _trained_threads(nodes):
        segments = thread[-1].conversation.segments
        for place in _trained_places(thread):
            part = np.zeros(len(segments[place].response_ids), np.float32)
            for node in thread:
                if node.left_out is None and node.tokens and node.end.closed == place:
                    part[node.end.response_tokens - 1] = rewards.get(node.number, 0.0)
            parts.append(part)
    return np.concatenate(parts)


def _trained_threads(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Each thread's calls up to the last trained call."""
    for thread in sorted({node.thread for node in nodes}):
        trained = [node for node in nodes if node.thread == thread]
        while trained and trained[-1].left_out is not None:
            trained.pop()
        if trained:
            yield trained


def _trained_places(nodes: Sequence[Node]) -> list[int]:
    """The indices of a thread's segments that have a trained token."""
    return sorted({node.end.closed for node in nodes if node.left_out is None and node.tokens})


def _trained(nodes: Sequence[Node]) -> list[Segment]:
    """A thread's segments that have a trained token. Left-out answers' tokens are outside the loss."""
    segments = nodes[-1].conversation.segments
    return [_masked(segments[place], place, nodes) for place in _trained_places(nodes)]


def _masked(segment: Segment, place: int, nodes: Iterable[Node]) -> Segment:
    """Segment number `place` of a thread, with the tokens of left-out answers masked."""
    mask = None
    for node in nodes:
        if node.left_out is None or not node.tokens or node.end.closed != place:
            continue
        if mask is None:
            mask = (
                np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask.copy()
            )
        end = node.end.response_tokens
        mask[end - node.tokens : end] = False
    return segment if mask is None else replace(segment, loss_mask=mask)

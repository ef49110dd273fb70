"""Makes a session's finished sample from its trained calls and the facts about them. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.workers.agents.loops import Rollout, failed, finish
from rollq.workers.gateway.sessions.call_nodes import Node
from rollq.workers.gateway.sessions.request_digest import shown_content
from rollq.workers.gateway.sessions.trained_segments import segment_numbers, trained_segments

Chooser = Callable[[Mapping[str, Any]], bool]
"""Returns whether to train a call, from its facts (see `as_facts`) and its `messages`."""


def leave_out(nodes: Sequence[Node], seen: Collection[int], chosen: Chooser | None) -> None:
    """Decide which calls are not trained, and why. `seen` holds the numbers of calls whose answer reached a client."""
    for node in nodes:
        if node.number not in seen and not node.children:
            node.left_out = "unseen"
    _supersede(nodes)
    if chosen is not None:
        _leave_out_others(nodes, chosen)


def _supersede(nodes: Sequence[Node]) -> None:
    """Leave out each call that was asked again after it ended, unless another call continues it."""
    by_digest: dict[bytes, list[Node]] = {}
    for node in nodes:
        if node.left_out is None:
            by_digest.setdefault(node.digest, []).append(node)
    for equal in by_digest.values():
        for node in equal:
            if not node.children and any(node.ended < other.begun for other in equal):
                node.left_out = "superseded"


def _leave_out_others(nodes: Sequence[Node], chosen: Chooser) -> None:
    """Leave out the calls that are not chosen."""
    for node in nodes:
        (facts,) = as_facts([node], {})
        if node.left_out is None and not chosen({**facts, "messages": node.conversation.messages}):
            node.left_out = "not chosen"


def finished_sample(nodes: Sequence[Node], rollout: Rollout, extra: Mapping[str, Any]) -> Sample:
    """The sample of all trained calls; a failed sample if there are none. Its text is the last trained answer."""
    segments = segment_numbers(nodes)
    left_out = sum(node.tokens for node in nodes if node.left_out is not None)
    facts = {**extra, "calls": as_facts(nodes, segments), **({"left_out_tokens": left_out} if left_out else {})}
    last = _last_trained(nodes)
    if last is None:
        return replace(failed("the agent made no call that is trained"), extra=facts)
    reason = FinishReason.LENGTH if last.finish_reason is FinishReason.LENGTH else FinishReason.STOP
    made = finish(rollout, trained_segments(nodes), reason, shown_content(last.turn, last.stop_text))
    if last.messages:
        facts["messages"] = list(last.conversation.messages)
    return replace(made, session_id=rollout.session, extra=facts)


def _last_trained(nodes: Sequence[Node]) -> Node | None:
    return next((node for node in reversed(nodes) if node.left_out is None), None)


def as_facts(nodes: Iterable[Node], segments: dict[int, int]) -> list[dict[str, Any]]:
    """The facts about each call: its number, its parent's number, its segment, and the reason why it is left out."""
    return [
        {
            "number": node.number,
            "parent": None if node.parent is None else node.parent.number,
            "segment": segments.get(node.number),
            "tokens": node.tokens,
            "left_out": node.left_out,
        }
        for node in sorted(nodes, key=lambda node: node.number)
    ]

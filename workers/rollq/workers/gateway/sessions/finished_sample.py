"""The finished sample of a session: the trained calls and the facts about them. Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.workers.agents.loops import Rollout, failed, finish
from rollq.workers.gateway.sessions.call_nodes import Node
from rollq.workers.gateway.sessions.call_tree import CallTree, as_facts
from rollq.workers.gateway.sessions.request_digest import shown_content

Chooser = Callable[[Mapping[str, Any]], bool]
"""Decides whether a call is trained, by its facts (see `as_facts`) and its `messages`."""


def leave_out(tree: CallTree, seen: Collection[int], chosen: Chooser | None) -> None:
    """Decide which calls are not trained, and why. `seen` are the numbers of calls whose answer reached a client."""
    for node in tree.nodes:
        if node.number not in seen and not node.children:
            node.left_out = "unseen"
    tree.supersede()
    if chosen is not None:
        _leave_out_others(tree, chosen)


def _leave_out_others(tree: CallTree, chosen: Chooser) -> None:
    """Leave out the calls that are not chosen."""
    for node in tree.nodes:
        (facts,) = as_facts([node], {})
        if node.left_out is None and not chosen({**facts, "messages": node.conversation.messages}):
            node.left_out = "not chosen"


def finished_sample(tree: CallTree, rollout: Rollout, extra: Mapping[str, Any]) -> Sample:
    """The sample of all trained calls; a failed sample if there are none. Its text is the last trained answer."""
    segments = tree.segment_numbers()
    left_out = sum(node.tokens for node in tree.nodes if node.left_out is not None)
    facts = {**extra, "calls": as_facts(tree.nodes, segments), **({"left_out_tokens": left_out} if left_out else {})}
    last = _last_trained(tree)
    if last is None:
        return replace(failed("the agent made no call that is trained"), extra=facts)
    reason = FinishReason.LENGTH if last.finish_reason is FinishReason.LENGTH else FinishReason.STOP
    made = finish(rollout, tree.segments(), reason, shown_content(last.turn, last.stop_text))
    if last.messages:
        facts["messages"] = list(last.conversation.messages)
    return replace(made, session_id=rollout.session, extra=facts)


def _last_trained(tree: CallTree) -> Node | None:
    return next((node for node in reversed(tree.nodes) if node.left_out is None), None)

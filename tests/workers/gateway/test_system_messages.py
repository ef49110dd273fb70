from pathlib import Path
from typing import Any

import pytest

from rollq.workers.gateway.sessions.accepted_messages import fold_system_messages, keeps_system_messages
from support.chat_engine import PLAIN, Model, chat_tokenizer
from support.gateway_calls import Client, make_session, run

LOOP = "{% for message in messages %}"
REFUSES = PLAIN.replace(
    LOOP, LOOP + "{% if message.role == 'system' and not loop.first %}{{ raise_exception('order') }}{% endif %}"
)
HOISTS = "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}" + PLAIN.replace(
    LOOP, "{% for message in messages if message.role != 'system' %}"
)
DROPS = PLAIN.replace(
    LOOP, "{% for message in [messages[0]] + messages[1:] | rejectattr('role', 'eq', 'system') | list %}"
)


@pytest.mark.parametrize(
    ("template", "keeps"), [(PLAIN, True), (REFUSES, False), (HOISTS, False), (DROPS, False)],
    ids=["keeps", "refuses", "hoists", "drops"],
)  # fmt: skip
def test_a_system_message_in_the_middle_reaches_the_model_where_it_was_said(
    template: str, keeps: bool, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    assert keeps_system_messages(tokenizer) is keeps
    session = make_session(Model(tokenizer, ["Yes", "No"]))
    client = Client(session, ({"role": "system", "content": "Be kind."},))

    async def use() -> None:
        await client.say("Hello")
        client.messages += ({"role": "system", "content": "Be brief."},)
        await client.say("Sure?")

    run(use)
    texts = [
        tokenizer.decode([*segment.prompt_ids.tolist(), *segment.response_ids.tolist()], special=True)
        for segment in session.sample(extra={}).segments
    ]
    assert len(texts) == 1
    assert texts[0].index("Yes") < texts[0].index("Be brief.") < texts[0].index("Sure?")


@pytest.mark.parametrize(
    ("roles", "folded"),
    [
        ("s:a u:b", "s:a u:b"),
        ("u:a s:b u:c", "u:a u:b\n\nc"),
        ("u:a s:b s:c u:d s:e", "u:a u:b\n\nc\n\nd u:e"),
        ("u:a s:b a:c", "u:a u:b a:c"),
    ],
)
def test_system_messages_become_words_of_the_user(roles: str, folded: str) -> None:
    def parsed(text: str) -> list[dict[str, Any]]:
        names = {"s": "system", "u": "user", "a": "assistant"}
        return [{"role": names[part[0]], "content": part[2:]} for part in text.split(" ")]

    assert list(fold_system_messages(parsed(roles))) == parsed(folded)

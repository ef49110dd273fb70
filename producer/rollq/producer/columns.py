"""How a row of a user's data becomes a `Prompt`: one mapping, whatever the rows were read from.

setting of the task     what it names                                      becomes
`prompt_field`          a text, or a list of chat messages                 `content`
                        (a column `messages` serves when it is absent)
`answer_field`          the reference answer, any value; "": none          `answer`
`ids_field`             token ids that win over the text; may be absent    `ids`
`metadata_fields`       what a judge or agent loop wants to know;          `metadata`
                        default: every column that is none of the above

A name may be a path into nested columns: `answer_field = "reward_model.ground_truth"`. A column whose own name has dots
in it wins. In `metadata` a path stands under its whole name, and a column of which only a part was used is kept whole.
A null counts as absent, in a message's fields too: tables with one type per column fill their gaps with it. Only an
answer and the content of a message may be null.

With `chat` a text becomes a user's message, so that the model's chat template is applied to it. `system_prompt` puts a
system message first, unless the row has one, and makes messages of texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from rollq.buffer.rollouts import Prompt
from rollq.producer.settings import PromptSettings

_MESSAGES: Final = "messages"
_MAX_TOKEN_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column becomes what: the settings above."""

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    ids_field: str = "prompt_ids"
    metadata_fields: tuple[str, ...] | None = None
    chat: bool = False
    system_prompt: str = ""

    @classmethod
    def of(cls, task: PromptSettings) -> Self:
        """Those of a task."""
        return cls(
            prompt_field=task.prompt_field,
            answer_field=task.answer_field,
            ids_field=task.ids_field,
            metadata_fields=task.metadata_fields,
            chat=task.chat,
            system_prompt=task.system_prompt,
        )

    def wants(self, column: str) -> bool:
        """Whether anything of a top-level column is needed; the others need not be read."""
        if self.metadata_fields is None:
            return True
        names = (self.prompt_field, _MESSAGES, self.answer_field, self.ids_field, *self.metadata_fields)
        return any(column == name or name.startswith(f"{column}.") for name in names)

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """A row as a prompt. Raises `ValueError` that says what is wrong with it."""
        content, ids = look_up(row, self.prompt_field), look_up(row, self.ids_field)
        field = self.prompt_field
        if content is None and (content := row.get(_MESSAGES)) is not None:
            field = _MESSAGES
        if content is None:
            raise ValueError(f"no field {field!r} (prompt_field), nor {_MESSAGES!r}; the row has {_names(row)}")
        if self.answer_field and look_up(row, self.answer_field, missing := object()) is missing:
            raise ValueError(
                f"no field {self.answer_field!r} (answer_field); the row has {_names(row)}; "
                'set answer_field = "" when prompts have no answer'
            )
        return Prompt(
            content=self._asked(_content(field, content)),
            answer=look_up(row, self.answer_field),
            ids=None if ids is None else _token_ids(self.ids_field, ids),
            metadata=self._metadata(row, field),
        )

    def _asked(self, content: str | tuple[Mapping[str, Any], ...]) -> str | tuple[Mapping[str, Any], ...]:
        """`content` as the model shall see it."""
        if isinstance(content, str):
            if not self.chat and not self.system_prompt:
                return content
            content = ({"role": "user", "content": content},)
        if self.system_prompt and content[0]["role"] != "system":
            content = ({"role": "system", "content": self.system_prompt}, *content)
        return content

    def _metadata(self, row: Mapping[str, Any], used: str) -> dict[str, Any]:
        if self.metadata_fields is not None:
            return {name: look_up(row, name) for name in self.metadata_fields}
        return {name: value for name, value in row.items() if name not in {used, self.answer_field, self.ids_field}}


def look_up(row: Any, path: str, default: Any = None) -> Any:
    """What stands at a path of column names joined by dots; `default` when nothing does."""
    if not isinstance(row, Mapping):
        return default
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return look_up(row.get(head), rest, default) if rest else default


def _content(field: str, value: Any) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"field {field!r} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} must be a text or a list of messages, not {_shown(value)}")
    return tuple(_message(f"{field}[{number}]", message) for number, message in enumerate(value))


def _message(name: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must be an object with a 'role', not {_shown(message)}")
    if not isinstance(message.get("content"), str | list) and message.get("tool_calls") is None:
        raise ValueError(f"{name}.content must be a text or a list, not {_shown(message.get('content'))}")
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} must be a list of token ids, not {_shown(value)}")
    for token in value:
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            raise ValueError(f"field {field!r} holds {_shown(token)}, which is no token id")
    return tuple(value)


def _names(row: Mapping[str, Any]) -> str:
    return _shown(sorted(row)[:20])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

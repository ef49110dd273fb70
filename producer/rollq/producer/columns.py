"""Maps a row of a user's data to a `Prompt`, identically for every file format.

setting of the task     column                                             field of the prompt
`prompt_field`          a text, or a list of chat messages                 `content`
                        (default if it is absent: `messages`)
`answer_field`          the reference answer, any value; "": none          `answer`
`ids_field`             the text's token ids; may be absent                `ids`
`images_field`          an image, or a list of images; may be absent       `images`
`system_prompt_field`   the row's own system prompt; may be absent         `content`
`tools_field`           definitions of tools for the chat template         `tools`
`metadata_fields`       values for judges and agent loops;                 `metadata`
                        default: all other columns

A name may be a path into nested columns: `answer_field = "reward_model.ground_truth"`. A column whose name contains
dots takes precedence. In `metadata`, a path appears under its full name, and a partly used column is kept whole. A null
counts as absent at every depth of a message, because tables with one type per column fill gaps with nulls. The same
holds within answers and metadata of such a table. Only a whole answer, a whole value of `metadata` and the content of a
message may be null.

An image is a path, an https or `data:` URL, or an object with one of them under `image`, `url` or `path`, and perhaps
the `sha256` of the file; files of `datasets` may have its bytes. The column names it, or the messages' parts of type
`image` or `image_url` do. Images in the column replace the texts `<image>` in the messages or, without such texts,
precede the user's first text.

Messages that end with an assistant message contain the answer, and are refused unless `final_answer` makes the last
message the reference answer, or a prefix that the model continues.

With `chat`, a string becomes a user message, and the model's chat template is applied. The row's system prompt,
otherwise `system_prompt`, becomes a system message at the start, unless the messages have one, and turns strings into
messages. `reply_prefix` becomes an assistant's message at the end, which the model continues.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from rollq.buffer.common import exact_json
from rollq.buffer.common.columns import look_up
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.prompts import ids_problem, message_problem, tools_problem
from rollq.producer.prompt_images import NamedImage, collect_images, image_of, place_images
from rollq.producer.settings import ByColumn, PromptSettings

_MESSAGES: Final = "messages"

Content = str | tuple[Mapping[str, Any], ...]
"""The content of a prompt: a string, or chat messages."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Maps a row's columns to a prompt's fields, by the settings above."""

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    ids_field: str = "prompt_ids"
    images_field: str = "images"
    metadata_fields: tuple[str, ...] | None = None
    chat: bool = False
    final_answer: Literal["refuse", "answer", "continue"] = "refuse"
    system_prompt: str = ""
    system_prompt_field: str = ""
    tools_field: str = ""
    reply_prefix: str = ""
    sorted_by: str = ""

    @classmethod
    def from_task(cls, task: PromptSettings) -> Self:
        """The mapping that a task's settings describe."""
        order = getattr(task, "prompt_order", None)  # evaluations have no order
        return cls(
            prompt_field=task.prompt_field,
            answer_field=task.answer_field,
            ids_field=task.ids_field,
            images_field=task.images_field,
            metadata_fields=task.metadata_fields,
            chat=task.chat,
            final_answer=task.final_answer,
            system_prompt=task.system_prompt,
            system_prompt_field=task.system_prompt_field,
            tools_field=task.tools_field,
            reply_prefix=task.reply_prefix,
            sorted_by=order.by if isinstance(order, ByColumn) else "",
        )

    def uses(self, column: str) -> bool:
        """Whether a top-level column or a part of it is used. Other columns need not be read."""
        if self.metadata_fields is None:
            return True
        fields = (self.prompt_field, _MESSAGES, self.answer_field, self.ids_field, self.images_field)
        names = (*fields, self.system_prompt_field, self.tools_field, self.sorted_by, *self.metadata_fields)
        return any(column == name or name.startswith(f"{column}.") for name in names)

    def absent(self, read_rows: Callable[[], Sequence[Mapping[str, Any]]]) -> str | None:
        """The problem with a setting that names a missing column; None if all named columns exist.

        Reads the rows only if settings name a column."""
        asked = list(self._asked())
        rows = read_rows() if asked else ()
        missing = object()
        for setting, name in asked if rows else ():
            if all(look_up(row, name, missing) is missing for row in rows):
                columns = ", ".join(sorted(set().union(*rows)))
                return f"{setting}: no row has a column {name!r}; the columns are {columns}"
        return None

    def _asked(self) -> Iterator[tuple[str, str]]:
        """Each setting that names a required column, with the column's name."""
        for name in self.metadata_fields or ():
            yield "metadata_fields", name
        for setting in ("ids_field", "images_field", "system_prompt_field", "tools_field"):
            if (name := getattr(self, setting)) != getattr(Columns(), setting):  # default names may be absent
                yield setting, name
        if self.sorted_by:
            yield "prompt_order", self.sorted_by

    def prompt(self, row: Mapping[str, Any], *, fills_gaps: bool = False) -> tuple[Prompt, tuple[NamedImage, ...]]:
        """Convert a row to a prompt without images, and its images. Raises `ValueError`, naming the column and the
        problem.

        With `fills_gaps`, the row's table writes nulls for names that its objects lack."""
        field, ids = self._field_of(row), look_up(row, self.ids_field)
        content, answer = self._without_answer(
            field, _content(field, look_up(row, field)), look_up(row, self.answer_field)
        )
        if answer is None:
            self._check_answer(row)
        content, images = self._with_images(row, self._with_system_prompt(row, content))
        content = self._with_reply_prefix(field, content)
        metadata = self._metadata(row, field)
        prompt = Prompt(
            content=content,
            tools=self._tools(row, content, fills_gaps=fills_gaps),
            answer=without_nulls(answer) if fills_gaps else answer,
            ids=None if ids is None else _token_ids(f"field {self.ids_field!r}", ids),
            metadata={name: without_nulls(value) if fills_gaps else value for name, value in metadata.items()},
        )
        return prompt, images

    def _without_answer(self, field: str, content: Content, answer: Any) -> tuple[Content, Any]:
        """The content of a prompt and its answer, which may come from the assistant's last message."""
        if isinstance(content, str) or content[-1]["role"] != "assistant":
            return content, answer
        if self.final_answer == "continue":
            return content, answer
        if self.final_answer == "refuse":
            raise ValueError(
                f"{field} ends with the assistant's message, so the model would see its answer; set "
                'rows.final_answer = "answer" to take it as the reference answer, or "continue" to have the model '
                "continue it"
            )
        if len(content) == 1:
            raise ValueError(f"{field} has no message before the assistant's")
        return content[:-1], content[-1].get("content") if answer is None else answer

    def _with_images(self, row: Mapping[str, Any], content: Content) -> tuple[Content, tuple[NamedImage, ...]]:
        """The content with a part per image, and the images that the column or the messages name."""
        images = tuple(image_of(f"field {self.images_field!r}", image) for image in self._named_images(row))
        if isinstance(content, str):
            return content, images
        content, inside = collect_images(content)
        if inside and images:
            raise ValueError(f"images are named by field {self.images_field!r} and in the messages: name them once")
        return (content, inside) if inside else (place_images(content, len(images)), images)

    def _named_images(self, row: Mapping[str, Any]) -> list[Any]:
        column = look_up(row, self.images_field)
        return [] if column is None else column if isinstance(column, list) else [column]

    def _field_of(self, row: Mapping[str, Any]) -> str:
        """The column with the prompt."""
        for field in (self.prompt_field, _MESSAGES):
            if look_up(row, field) is not None:
                return field
        only_ids = ", and token ids need a text beside them" if look_up(row, self.ids_field) is not None else ""
        raise ValueError(
            f"no field {self.prompt_field!r} (prompt_field), nor {_MESSAGES!r}{only_ids}; the row has {_names(row)}"
        )

    def _check_answer(self, row: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a row without the answer's column, unless prompts have no answers."""
        if self.answer_field and look_up(row, self.answer_field, missing := object()) is missing:
            raise ValueError(
                f"no field {self.answer_field!r} (answer_field); the row has {_names(row)}; "
                'set rows.answer_field = "" when prompts have no answer'
            )

    def _with_system_prompt(self, row: Mapping[str, Any], content: Content) -> Content:
        """Turn a string into messages and add the system message, if the settings say so."""
        system_prompt = self._system_prompt(row)
        if isinstance(content, str):
            if not self.chat and not system_prompt:
                return content
            content = ({"role": "user", "content": content},)
        if system_prompt and content[0]["role"] != "system":
            content = ({"role": "system", "content": system_prompt}, *content)
        return content

    def _system_prompt(self, row: Mapping[str, Any]) -> str:
        own = look_up(row, self.system_prompt_field) if self.system_prompt_field else None
        if own is None:
            return self.system_prompt
        if not isinstance(own, str):
            raise ValueError(
                f"field {self.system_prompt_field!r} (system_prompt_field) must be a string, not {own!r:.80}"
            )
        return own

    def _tools(self, row: Mapping[str, Any], content: Content, *, fills_gaps: bool) -> tuple[Mapping[str, Any], ...]:
        """The row's tool definitions, given as a list or as its JSON."""
        tools = look_up(row, self.tools_field) if self.tools_field else None
        name = f"field {self.tools_field!r} (tools_field)"
        if isinstance(tools, str) and tools:
            tools, fills_gaps = _parsed(name, tools), False
        if tools is None or tools == "":
            return ()
        self._check_tools(name, tools, row, content)
        return tuple(map(without_nulls, tools)) if fills_gaps else tuple(tools)

    def _check_tools(self, name: str, tools: Any, row: Mapping[str, Any], content: Content) -> None:
        if problem := tools_problem(name, tools):
            raise ValueError(problem)
        if tools and look_up(row, self.ids_field) is not None:
            raise ValueError(f"{name}: the chat template shows tools, and token ids bypass it: leave out one of them")
        if tools and isinstance(content, str):
            raise ValueError(f"{name}: the chat template shows tools, and the prompt is a string: set rows.chat = true")

    def _with_reply_prefix(self, field: str, content: Content) -> Content:
        """The content with the start of the assistant's reply, if the settings have one."""
        if not self.reply_prefix:
            return content
        if isinstance(content, str):
            raise ValueError(
                f"{field} is a string, and reply_prefix starts an assistant's message: set rows.chat = true"
            )
        if content[-1]["role"] == "assistant":
            raise ValueError(f"{field} ends with the assistant's message, so leave out reply_prefix")
        return (*content, {"role": "assistant", "content": self.reply_prefix})

    def _metadata(self, row: Mapping[str, Any], used: str) -> dict[str, Any]:
        if self.metadata_fields is not None:
            return {name: look_up(row, name) for name in self.metadata_fields}
        used_names = {
            used,
            self.answer_field,
            self.ids_field,
            self.images_field,
            self.system_prompt_field,
            self.tools_field,
        }
        return {name: value for name, value in row.items() if name not in used_names}


def _content(field: str, value: Any) -> Content:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"field {field!r} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} must be a string or a list of messages, not {_shown(value)}")
    return tuple(_message(f"{field}[{number}]", message) for number, message in enumerate(value))


def _message(name: str, message: Any) -> Mapping[str, Any]:
    if problem := message_problem(name, message):
        raise ValueError(problem)
    if not isinstance(message.get("content"), str | list) and message.get("tool_calls") is None:
        raise ValueError(f"{name}.content must be a string or a list, not {_shown(message.get('content'))}")
    return {key: without_nulls(value) for key, value in message.items() if value is not None or key == "content"}


def without_nulls(value: Any) -> Any:
    """A copy without null values, at every depth of its objects."""
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if problem := ids_problem(name, value):
        raise ValueError(problem)
    return tuple(value)


def _parsed(name: str, tools: str) -> Any:
    try:
        return exact_json.loads(tools.encode())
    except ValueError:
        raise ValueError(f"{name} is not JSON: {tools!r:.80}") from None


def _names(row: Mapping[str, Any]) -> str:
    return _shown(sorted(row)[:20])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

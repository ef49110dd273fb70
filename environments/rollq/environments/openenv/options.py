"""`env_options` of the kind `openenv`, and the options of its episodes, for workers."""

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from rollq.buffer.rules.settings import Settings
from rollq.environments.openenv.templates import JSON, NAMES, names_in

PLACE: Final = frozenset({"seed", "split", "index"})
"""Keys of a reset's data that each row sets."""


class EpisodeOptions(Settings):
    """How an episode is opened, and how the model takes part in it."""

    observation: str = Field(
        default="", description="template of an observation, such as 'Board: {board}'; empty: the whole observation"
    )
    action: dict[str, Any] | str | None = Field(
        default=None, description="action with {text}, {answer} or {json} of the model's turn; default: its only field"
    )
    invalid: Literal["reply", "end"] = Field(
        default="reply", description="whether a refused action gets a message as its answer, or ends the episode with 0"
    )
    reset: dict[str, Any] = Field(default_factory=dict, description="extra data for each reset")

    @model_validator(mode="after")
    def _reset_has_no_place(self) -> Self:
        if ours := self.reset.keys() & PLACE:
            raise ValueError(f"reset.{min(ours)} comes from the row: leave it out")
        return self

    @model_validator(mode="after")
    def _action_reads_the_turn(self) -> Self:
        if self.action is None:
            return self
        if isinstance(self.action, str) and self.action != JSON:
            raise ValueError(f'action is a table, as in {{ message = "{{text}}" }}, or "{JSON}"')
        names = names_in(self.action)
        if not names or names - set(NAMES):
            raise ValueError("action has {text}, {answer} or {json} of the model's turn, and no other names in braces")
        return self


class OpenEnvOptions(EpisodeOptions):
    """`env_options`."""

    tools: bool = Field(default=False, description="the model calls the environment's MCP tools")
    prompt: str = Field(
        default="",
        description="template of a row's prompt, with fields of its {task} and first observation; default: observation",
    )
    seed: int = Field(default=0, ge=0, description="the seeds of the rows are drawn from it")

    @model_validator(mode="after")
    def _tools_are_the_actions(self) -> Self:
        if self.tools and self.action is not None:
            raise ValueError("action is for text, but with tools = true the model calls tools: leave one of them out")
        return self

    def for_episodes(self) -> dict[str, Any]:
        """The options of episodes, without the defaults."""
        return self.model_dump(include=set(EpisodeOptions.model_fields), exclude_defaults=True)

"""Reads a group's prompt for its samples: tokens, images, and the conversation's tokenizer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollq.buffer.errors import ConfigError, ImageError
from rollq.buffer.images.processor import PlacedImages
from rollq.buffer.values.rollouts import Int32Array, Prompt
from rollq.workers.agents.image_prompts import ImageTokenizer, read_images
from rollq.workers.agents.loops import prompt_tokens
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt's ids int32 [P], including its images' tokens, and the tokenizer for its conversation.

    The tokens in `reserved` represent images.
    """

    ids: Int32Array
    tokenizer: Tokenizer
    images: PlacedImages | None = None
    reserved: frozenset[int] = frozenset()

    def images_in(self, ids: Sequence[int]) -> PlacedImages | None:
        """The images whose tokens are in `ids`, a request's prompt and prefix; None if there are none.

        Raises `ImageError` if the image tokens do not match the prompt's images.
        """
        if self.reserved.isdisjoint(ids):
            return None
        if self.images is None:
            raise ImageError(
                "the prompt has a place for an image, and names no image: set rows.images_field of the task"
            )
        self.images.collapse(ids)  # raises unless all images are there
        return self.images

    def check_response(self, ids: Sequence[int]) -> None:
        """Raise `ImageError` for a response with image tokens: a trainer would expect an image there."""
        if made := self.reserved.intersection(ids):
            raise ImageError(f"the model made the token {min(made)}, which means an image")

    def extra(self) -> dict[str, Any]:
        """For the trainer, the name of the class that processed the images."""
        if self.images is None:
            return {}
        return {"image_processor": self.images.processor}


def tokenizer_of(tokenizer: Tokenizer, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that renders with a task's `template_options`. Raises `ConfigError` as `HfTokenizer.with_options`
    does, and for a tokenizer without chat templates."""
    if not options:
        return tokenizer
    if not isinstance(tokenizer, HfTokenizer):
        raise ConfigError("rows.template_options: needs the chat template of a model's folder, by [worker] tokenizer")
    return tokenizer.with_options(options)


async def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> ReadPrompt:
    """Tokenise a prompt, and read its images. Raises `ImageError` and the tokenizer's exceptions."""
    if not prompt.images:
        reserved = tokenizer.reserved if isinstance(tokenizer, HfTokenizer) else frozenset()
        return ReadPrompt(prompt_tokens(prompt, tokenizer), tokenizer, reserved=reserved)
    images = await asyncio.to_thread(read_images, prompt, tokenizer)
    with_images = ImageTokenizer(tokenizer, images)
    ids = prompt_tokens(prompt, with_images)
    images.collapse(ids.tolist())  # raises unless all images are there
    return ReadPrompt(ids, with_images, images, images.reserved)

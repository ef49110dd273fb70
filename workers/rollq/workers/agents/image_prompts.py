"""The tokenizer for prompts with images. It replaces each image's placeholder in the text with the image's tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollq.buffer.errors import ImageError
from rollq.buffer.images.processor import Images, PlacedImages
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer


def read_images(prompt: Prompt, tokenizer: Tokenizer) -> PlacedImages:
    """Read and process a prompt's images. Slow: call this in a thread.

    Raises `ImageError`, and `ConfigError` for a text-only model.
    """
    if not isinstance(tokenizer, HfTokenizer):
        raise ImageError("prompts with images need the tokenizer in a model's folder: set [worker] tokenizer")
    return tokenizer.images.place(Images.read(prompt.images, prompt.image_options))


class ImageTokenizer:
    """`Tokenizer` for a conversation whose prompt has `images`.

    Invariant: ids hold all images' tokens or none. All images are in the prompt; later messages cannot add any.
    """

    def __init__(self, tokenizer: Tokenizer, images: PlacedImages) -> None:
        self._tokenizer = tokenizer
        self._images = images

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Raises `ImageError` if `text` has only some of the images' placeholders."""
        return self.expand(self._tokenizer.encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`. Raises `ImageError` like `encode`."""
        return self.expand(self._tokenizer.encode_prompt(text))

    def expand(self, ids: list[int]) -> list[int]:
        """The ids with images' tokens in place of placeholders. Raises `ImageError` like `encode`."""
        return self._images.expand(ids) if self._images.placeholder_id in ids else ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """See `Tokenizer.decode`."""
        return self._tokenizer.decode(ids, special=special)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """See `Tokenizer.render`. Each image is a placeholder in the text."""
        return self._tokenizer.render(messages, tools)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of what `render` returns. Raises `ImageError` like `encode`."""
        return self.encode(self.render(messages, tools))

    def chat_continued(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """See `Tokenizer.chat_continued`. Raises `ImageError` like `encode`."""
        return self.expand(self._tokenizer.chat_continued(messages, tools))

    @property
    def chat_template(self) -> str | None:
        """See `Tokenizer.chat_template`."""
        return self._tokenizer.chat_template

    @property
    def template_options(self) -> Mapping[str, Any]:
        """See `Tokenizer.template_options`."""
        return self._tokenizer.template_options

    @property
    def eos_ids(self) -> frozenset[int]:
        """See `Tokenizer.eos_ids`."""
        return self._tokenizer.eos_ids

    @property
    def eos_id(self) -> int:
        """See `Tokenizer.eos_id`."""
        return self._tokenizer.eos_id

"""A model's image processor: makes a prompt's image tokens, and the tensors that the network reads. Needs transformers,
torch and Pillow.

A text's ids hold one placeholder per image until `PlacedImages.expand` replaces it with the image's tokens. Worker and
trainer use the same folder and options, so the network gets the same tensors in both.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollq.buffer.errors import ConfigError, ImageError
from rollq.buffer.images.files import open_image
from rollq.buffer.values.rollouts import ImageRef
from rollq.buffer.wire.images import read_image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_TEXT = ("input_ids", "attention_mask", *_TOKEN_TYPES)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """One prompt's image files, in order, and the image processor's arguments for them."""

    files: tuple[bytes, ...]
    options: Mapping[str, Any]

    @classmethod
    def read(cls, images: Sequence[ImageRef], options: Mapping[str, Any]) -> Self:
        """Read the files. Raises `ImageError`."""
        return cls(tuple(map(read_image, images)), options)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImages:
    """Images, and each image's tokens in a prompt.

    A prompt's text has `placeholder`, with the id `placeholder_id`, once per image. Tokens in `reserved` represent
    images and must not occur in responses. `processor` names the image processor's class.
    """

    images: Images
    tokens: tuple[tuple[int, ...], ...]
    placeholder: str
    placeholder_id: int
    reserved: frozenset[int]
    processor: str

    def expand(self, ids: Sequence[int]) -> list[int]:
        """The ids with each placeholder replaced by its image's tokens.

        Raises `ImageError` unless there is one placeholder for each image.
        """
        if (found := list(ids).count(self.placeholder_id)) != len(self.tokens):
            raise ImageError(
                f"the prompt has {found} placeholders {self.placeholder!r} for {len(self.tokens)} images: in messages, "
                'an image is the part {"type": "image"}'
            )
        tokens = iter(self.tokens)
        return [one for token in ids for one in (next(tokens) if token == self.placeholder_id else (token,))]

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Undo `expand`, for an engine that expands ids itself.

        Raises `ImageError` unless the ids hold each image once, in order, and no other image tokens.
        """
        ids = list(ids)
        collapsed: list[int] = []
        place = 0
        for tokens in self.tokens:
            start = _find(ids, list(tokens), place)
            collapsed += [*ids[place:start], self.placeholder_id]
            place = start + len(tokens)
        collapsed += ids[place:]
        if sum(map(self.reserved.__contains__, collapsed)) != len(self.tokens):
            raise ImageError(
                "the prompt, or a later message, has image tokens without an image: put all images into the prompt, "
                "and remove image tokens from texts"
            )
        return collapsed


def has_images(folder: Path) -> bool:
    """Whether the model in `folder` reads images."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def model_class(folder: Path) -> Any:
    """The transformers class that loads the model in `folder`, including any part that reads images.

    Raises `OSError` and `ValueError` if there is no model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if has_images(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return AutoModelForImageTextToText
    return AutoModelForCausalLM


class ImageProcessor:
    """The processor that `save_pretrained` wrote into a model's folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if the folder has no image processor, or the processor cannot be loaded."""
        if not has_images(folder):
            raise ConfigError(f"prompts have images, but {str(folder)!r} has no {PROCESSOR_FILES[0]}")
        try:
            from transformers import AutoProcessor

            self._processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
            images = self._processor.image_processor
            # Some models mark an image's position with a token that is not one of the image's own.
            self._placeholder = str(getattr(self._processor, "boi_token", None) or self._processor.image_token)
            self._placeholder_id = int(self._processor.tokenizer.convert_tokens_to_ids(self._placeholder))
            self.image_token_id = int(self._processor.image_token_id)
            """The token id that represents an image, or most of it, in a prompt."""
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            raise ConfigError(f"the image processor in {str(folder)!r} cannot be used: {error}") from error
        self.name = type(images).__name__
        """The image processor's class; without torchvision, a different class computes slightly different pixels."""
        self.reserved = frozenset({self._placeholder_id, self.image_token_id})
        """Tokens that represent an image."""
        self._options = frozenset(images.valid_kwargs.__annotations__) - {"device", "return_tensors"}

    def place(self, images: Images) -> PlacedImages:
        """Determine the images' tokens. Raises `ImageError` if a file is not an image or the options do not fit."""
        if unknown := images.options.keys() - self._options:
            raise ImageError(f"image_options: {self.name} does not take {', '.join(sorted(unknown))}")
        tokens = [
            self._process(self._placeholder, [image], images.options)["input_ids"][0].tolist() for image in images.files
        ]
        tokens_of_each = tuple(map(tuple, tokens))
        return PlacedImages(images, tokens_of_each, self._placeholder, self._placeholder_id, self.reserved, self.name)

    def inputs(self, input_ids: Any, rows: Sequence[Images]) -> dict[str, Any]:
        """The model's inputs other than ids int64 [B, T]. `rows` holds the images of each row that has any, in order.

        Raises `ImageError` like `place`.
        """
        processed = [self._process(self._placeholder * len(row.files), row.files, row.options) for row in rows]
        names = processed[0].keys()
        inputs = {name: _stack([row[name] for row in processed]) for name in names if name not in _TEXT}
        inputs |= dict.fromkeys(names & set(_TOKEN_TYPES), (input_ids == self.image_token_id).long())
        return {name: tensor.to(input_ids.device) for name, tensor in inputs.items()}

    def _process(self, text: str, files: Sequence[bytes], options: Mapping[str, Any]) -> Any:
        images = [open_image(file) for file in files]
        try:
            return self._processor(
                text=[text], images=[images], add_special_tokens=False, return_tensors="pt", **options
            )
        except Exception as error:
            raise ImageError(f"the image processor fails: {type(error).__name__}: {error}") from error


def _stack(tensors: Sequence[Any]) -> Any:
    """Concatenate the rows' tensors; each dimension but the first is zero-padded to the largest."""
    from torch import cat
    from torch.nn.functional import pad

    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [most - size for most, size in zip(largest, tensor.shape[1:], strict=True)]
        padded.append(pad(tensor, [number for gap in reversed(missing) for number in (0, gap)]))
    return cat(padded)


def _find(ids: list[int], wanted: list[int], start: int) -> int:
    """The index of the first `wanted` in `ids`, at or after `start`. Raises `ImageError` if there is none."""
    with suppress(ValueError):
        while True:
            start = ids.index(wanted[0], start)
            if ids[start : start + len(wanted)] == wanted:
                return start
            start += 1
    raise ImageError("the tokens of an image are not in the prompt")

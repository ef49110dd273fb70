"""Images in the rows of a user's data: finding them in columns and messages, and turning them into references."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ImageError
from rollq.buffer.rollouts import ImageRef
from rollq.buffer.wire.images import INLINE, digest_of_image, inline_image, read_image

Messages = tuple[Mapping[str, Any], ...]

MARK: Final = "<image>"
"""The place of an image in a message whose content is a text."""
PART: Final[Mapping[str, Any]] = {"type": "image"}
"""The place of an image in a message whose content is a list of parts, as chat templates read it."""
_NAMES = ("bytes", "image", "url", "path")  # in rows of `datasets`, `path` is a mere name beside `bytes`


def image_of(name: str, value: Any) -> ImageRef:
    """The image that a value of the row names. Raises `ValueError`, which calls it `name`."""
    if isinstance(value, str) and value:
        return ImageRef(value)
    if isinstance(value, Mapping):
        where = next((value[key] for key in _NAMES if value.get(key)), None)
        if isinstance(where, str):
            return ImageRef(where, value.get("sha256"))
    raise ValueError(f"{name}: an image is a path, an https URL, or an object with one of both, not {value!r:.80}")


def collect_images(messages: Messages) -> tuple[Messages, tuple[ImageRef, ...]]:
    """The messages with `PART` in place of each part that names an image, and these images in order.

    Raises `ValueError` for a part of type `image` that names none.
    """
    images: list[ImageRef] = []

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        named = {name: value for name, value in part.items() if value is not None}  # tables fill gaps with nulls
        named = named.get("image_url", named)
        if named == PART:  # its image is in the column
            return part
        images.append(image_of(f"a part of type {part['type']!r}", named))
        return PART

    changed = tuple(
        {**message, "content": list(map(plain, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    )
    return changed, tuple(images)


def place_images(messages: Messages, count: int) -> Messages:
    """The messages with a `PART` for each of `count` images: in place of `MARK`, else before the user's first text.

    Raises `ValueError` for another number of places than images.
    """
    parts = [_parts(message.get("content")) for message in messages]
    places = sum(part == PART for content in parts for part in content)
    if not places:
        user = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if user is None:
            raise ValueError(f"there is no message of the user for {count} images")
        parts[user] = [PART] * count + parts[user]
    elif places != count:
        raise ValueError(f"the messages have {places} places for {count} images")
    return tuple(
        {**message, "content": content} if PART in content else message
        for message, content in zip(messages, parts, strict=True)
    )


def _parts(content: Any) -> list[Any]:
    """The content of a message as parts. A text is split where it has marks."""
    if not isinstance(content, str):
        return list(content or ())
    parts: list[Any] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [PART] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Finds the files of images. Relative paths are those of `folder`; files of up to `inline_bytes` become URLs that
    hold them."""

    folder: Path
    inline_bytes: int

    def resolve(self, image: ImageRef) -> ImageRef:
        """The reference to an image as workers and trainers read it, with its checksum.

        A URL is not read here: its checksum is unknown unless the row gives it. Raises `ImageError` for a file that
        cannot be read.
        """
        if "://" in image.url:
            return image
        if image.url.startswith("data:"):  # whatever it says about its type
            return self._inline(read_image(ImageRef(INLINE + image.url.partition(";base64,")[2], image.sha256)))
        path = (self.folder / image.url).absolute()
        data = read_image(ImageRef(path.as_uri(), image.sha256))
        if not data:
            raise ImageError(f"image {str(path)!r} is empty")
        return inline_image(data) if len(data) <= self.inline_bytes else ImageRef(path.as_uri(), digest_of_image(data))

    def _inline(self, data: bytes) -> ImageRef:
        if len(data) > self.inline_bytes:
            raise ImageError(
                f"the row holds an image of {len(data)} bytes: raise inline_image_bytes to send it through Redis, or "
                "write images to files and name their paths"
            )
        return inline_image(data)

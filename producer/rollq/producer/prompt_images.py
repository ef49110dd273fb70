"""Finds images in columns and messages of a user's rows, and turns them into references."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from rollq.buffer.errors import ConfigError, ImageError
from rollq.buffer.values.rollouts import ImageRef
from rollq.buffer.wire.images import INLINE, inline_image, read_file

Messages = tuple[Mapping[str, Any], ...]

MARK: Final = "<image>"
"""Marks an image's position in a message whose content is a string."""
PART: Final[Mapping[str, Any]] = {"type": "image"}
"""Marks an image's position in a message whose content is a list of parts, in the form that chat templates read."""
INLINE_BYTES: Final = 16_384
"""Image files up to this size are stored in Redis; larger files are named by their URL."""
MOST_INLINE_BYTES: Final = 1 << 20
"""The largest image that a row may contain, since it is stored in Redis."""
_NAMES = ("bytes", "image", "url", "path")  # in rows of `datasets` with `bytes`, `path` is only a name


@dataclass(frozen=True, slots=True)
class NamedImage:
    """A row's reference to an image: a path or a URL, and the file's sha256 if the row has it."""

    place: str
    sha256: str | None = None


def image_of(name: str, value: Any) -> NamedImage:
    """The image that a row's value names. Raises `ValueError` with the value's `name`."""
    if isinstance(value, str) and value:
        return NamedImage(value)
    if isinstance(value, Mapping):
        where = next((value[key] for key in _NAMES if value.get(key)), None)
        if isinstance(where, str):
            return NamedImage(where, value.get("sha256"))
    raise ValueError(f"{name}: an image is a path, an https URL, or an object with either, not {value!r:.80}")


def collect_images(messages: Messages) -> tuple[Messages, tuple[NamedImage, ...]]:
    """The messages with `PART` in place of each part that names an image, and these images in order.

    Raises `ValueError` for a part of type `image` that names no image.
    """
    images: list[NamedImage] = []

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        named = {name: value for name, value in part.items() if value is not None}  # tables fill gaps with nulls
        named = named.get("image_url", named)
        if named == PART:  # its image is in the column
            return PART
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

    Raises `ValueError` if the numbers of marks and images differ.
    """
    if not count:  # without images, marks are ordinary text
        _check_no_place(messages)
        return messages
    parts = [_parts(message.get("content")) for message in messages]
    places = sum(content.count(PART) for content in parts)
    if not places:
        user = _first_user(messages, count)
        parts[user] = [PART] * count + parts[user]
    elif places != count:
        raise ValueError(f"the messages have {places} places for {count} images")
    return tuple(map(_with_parts, messages, parts))


def _with_parts(message: Mapping[str, Any], parts: list[Any]) -> Mapping[str, Any]:
    return {**message, "content": parts} if PART in parts else message


def _check_no_place(messages: Messages) -> None:
    if any(PART in message["content"] for message in messages if isinstance(message.get("content"), list)):
        raise ValueError("the messages have places for images, and the row names no image: set rows.images_field")


def _first_user(messages: Messages, count: int) -> int:
    for number, message in enumerate(messages):
        if message["role"] == "user":
            return number
    raise ValueError(f"there is no user message for {count} images")


def _parts(content: Any) -> list[Any]:
    """A message's content as parts. A text is split at its marks."""
    parts: list[Any] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ()):
        parts += _split(part)
    return parts


def _split(part: Any) -> list[Any]:
    if not isinstance(part, Mapping) or part.get("type") != "text" or MARK not in str(part.get("text")):
        return [part]
    parts: list[Any] = []
    for number, text in enumerate(part["text"].split(MARK)):
        parts += [PART] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _check(data: bytes, image: NamedImage) -> None:
    if find_spec("PIL") is None:
        raise ConfigError("prompts with images need the package Pillow: pip install 'rollq[images]'")
    from rollq.buffer.images.files import check_image

    try:
        check_image(data)
    except ImageError as error:
        raise ImageError(f"image {image.place[:80]!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Finds image files. Paths are relative to `folder`; files of up to `INLINE_BYTES` become `data:` URLs.

    Invariant: rows are untrusted. Only files in `folder` and `more_folders` are read, even through links, and only
    images become part of a prompt.
    """

    folder: Path
    more_folders: tuple[Path, ...]

    def resolve(self, image: NamedImage) -> ImageRef:
        """The reference to an image, in the form that workers and trainers read.

        A URL with a checksum in the row is not read here. Raises `ImageError` for a file that is outside the folders,
        cannot be read, is not an image or has another checksum, and `ConfigError` without Pillow.
        """
        if image.place.startswith("data:"):  # of any type
            header, mark, encoded = image.place.partition(";base64,")
            if not mark:
                raise ImageError(f"image {header[:40]!r}...: a data: URL must have base64 data")
            return self._reference(read_file(INLINE + encoded), image, None)
        if image.place.startswith("https://") and image.sha256 is not None:
            return ImageRef(image.place, image.sha256)
        if "://" in image.place and not image.place.startswith("file://"):
            return self._reference(read_file(image.place), image, image.place)
        path = self._path(image.place)
        return self._reference(read_file(self._inside(path).as_uri()), image, path.as_uri())

    def _path(self, place: str) -> Path:
        """The absolute path that a row names, or the path of its `file:///` URL."""
        parts = urlsplit(place)
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise ImageError(f"image {place[:80]!r} is on another machine: name its path here")
        return (self.folder / (unquote(parts.path) if parts.scheme == "file" else place)).absolute()

    def _inside(self, path: Path) -> Path:
        """The file at a path, with all links resolved. Raises `ImageError` if it is in none of the folders."""
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a null byte
            raise ImageError(f"image {str(path)[:80]!r} cannot be read: {error}") from error
        folders = [folder.resolve() for folder in (self.folder, *self.more_folders)]
        if not any(resolved.is_relative_to(folder) for folder in folders):
            leads = "" if resolved == path else f"leads to {str(resolved)[:80]!r}, which "
            allowed = " or ".join(repr(str(folder)) for folder in folders)
            raise ImageError(
                f"image {str(path)[:80]!r} {leads}is not in {allowed}: name its folder in rows.image_folders of the "
                "task or evaluation, if its rows may read there"
            )
        return resolved

    def _reference(self, data: bytes, image: NamedImage, url: str | None) -> ImageRef:
        """The reference to `data`, which is at `url` or only in the row."""
        _check(data, image)
        inline = inline_image(data)
        if image.sha256 not in (None, inline.sha256):
            raise ImageError(f"image {image.place[:80]!r}: sha256 is {inline.sha256}, the row says {image.sha256}")
        if url is not None and len(data) > INLINE_BYTES:
            return ImageRef(url, inline.sha256)
        if len(data) > MOST_INLINE_BYTES:
            raise ImageError(
                f"the row holds an image of {len(data):,} bytes, more than {MOST_INLINE_BYTES:,}: name a file"
            )
        return inline

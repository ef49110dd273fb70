"""Reads image files in the supported formats. Needs Pillow."""

import io
from typing import Any

from rollq.buffer.errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Supported formats; only an animation's first picture is read."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""PIL modes with at most 8 bits per channel: PIL clips other modes."""
MOST_PIXELS = 1 << 26


def open_image(data: bytes) -> Any:
    """Return a file's PIL image in RGB, rotated as its camera recorded, with transparency on white.

    Raises `ImageError` if the file is not an image or has more than `MOST_PIXELS`.
    """
    from PIL import Image, ImageOps

    try:
        picture = ImageOps.exif_transpose(_opened(data)).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    except Exception as error:
        raise _not_an_image(data, error) from error


def check_image(data: bytes) -> None:
    """Raise `ImageError` unless the file is an image that `open_image` reads. Does not decode pixels."""
    try:
        _opened(data).verify()
    except Exception as error:
        raise _not_an_image(data, error) from error


def _opened(data: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels; the limit is {MOST_PIXELS}")
    if image.mode not in MODES:
        raise ValueError(f"its pixels have mode {image.mode!r}; save it with 8 bits per channel")
    return image


def _not_an_image(data: bytes, error: Exception) -> ImageError:
    return ImageError(f"a file of {len(data)} bytes is not a readable image: {error}")

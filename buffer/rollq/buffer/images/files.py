"""Files of images: the formats that are read, and their pixels. Needs Pillow."""

import io
from typing import Any

from rollq.buffer.errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of image files that are read; of animations only the first picture."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Modes of PIL with at most 8 bits per channel: PIL clips the others."""
MOST_PIXELS = 1 << 26


def open_image(data: bytes) -> Any:
    """The PIL image in a file, in RGB, turned as its camera noted, and with white behind what is transparent.

    Raises `ImageError` for a file that is not an image, and for more than `MOST_PIXELS`.
    """
    from PIL import Image, ImageOps

    try:
        picture = ImageOps.exif_transpose(_opened(data)).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    except Exception as error:
        raise _not_an_image(data, error) from error


def check_image(data: bytes) -> None:
    """Raise `ImageError` for a file that is not an image of a kind that `open_image` reads. Pixels are not decoded."""
    try:
        _opened(data).verify()
    except Exception as error:
        raise _not_an_image(data, error) from error


def _opened(data: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, and at most {MOST_PIXELS} are read")
    if image.mode not in MODES:
        raise ValueError(f"its pixels are of mode {image.mode!r}; write it with 8 bits per channel")
    return image


def _not_an_image(data: bytes, error: Exception) -> ImageError:
    return ImageError(f"a file of {len(data)} bytes is not an image that can be read: {error}")

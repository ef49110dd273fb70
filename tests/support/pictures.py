"""Image files for tests."""

import io

from PIL import Image


def picture(width: int, height: int, *, seed: int) -> bytes:
    """A PNG file with an image of random colours, another one at each call; `seed` only sets how bright it is."""
    image = Image.merge("RGB", [Image.effect_noise((width, height), 60 + 20 * seed) for _ in range(3)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()

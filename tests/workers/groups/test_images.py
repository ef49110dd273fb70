"""Prompts with images in a worker: all images are in the ids, or the sample fails and says why."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollq.buffer.errors import ImageError
from rollq.buffer.images.files import open_image
from rollq.buffer.values.rollouts import ImageRef, Prompt
from rollq.buffer.wire.images import inline_image
from rollq.workers.agents.conversation import Conversation
from rollq.workers.groups.read_prompts import ReadPrompt, read_prompt
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.pictures import picture
from support.vision_families import IMAGE, PATCHES, make_vision_model

ONE, TWO = picture(9, 9, seed=1), picture(30, 9, seed=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return HfTokenizer(make_vision_model(tmp_path_factory.mktemp("llava"), "llava", seed=0))


def read(prompt: Prompt, tokenizer: HfTokenizer) -> ReadPrompt:
    return asyncio.run(read_prompt(prompt, tokenizer))


def chat(*parts: str) -> tuple[dict[str, Any], ...]:
    """A user's message; `image` is an image, all else text."""
    content = [{"type": "image"} if part == "image" else {"type": "text", "text": part} for part in parts]
    return ({"role": "user", "content": content},)


def test_each_image_is_as_many_tokens_as_the_model_wants(tokenizer: HfTokenizer) -> None:
    prompt = Prompt(chat("image", "or", "image"), images=(inline_image(ONE), inline_image(TWO)))
    found = read(prompt, tokenizer)
    text = tokenizer.encode("user: "), tokenizer.encode("or"), tokenizer.encode("\nassistant: ")
    images = [IMAGE] * PATCHES
    assert found.ids.tolist() == [*text[0], *images, *text[1], *images, *text[2]]
    assert found.extra() == {"image_processor": "CLIPImageProcessorPil"}
    assert found.images is not None
    assert found.images.collapse(found.ids.tolist()).count(IMAGE) == 2


def test_ids_that_are_given_have_a_placeholder_per_image(tokenizer: HfTokenizer) -> None:
    prompt = Prompt("", ids=(65, IMAGE, 66), images=(inline_image(ONE),))
    assert read(prompt, tokenizer).ids.tolist() == [65, *[IMAGE] * PATCHES, 66]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (Prompt("no place", images=(inline_image(ONE),)), "tokens of an image are not in the prompt"),
        (Prompt("<image>", images=(inline_image(ONE),) * 2), "1 placeholders '<image>' for 2 images"),
        (Prompt("<image><image>", images=(inline_image(ONE),)), "2 placeholders '<image>' for 1 images"),
        (Prompt("<image>", images=(inline_image(b"no image"),)), "a file of 8 bytes is not a readable image"),
        (Prompt("<image>", images=(ImageRef("file:///gone.png", "0" * 64),)), "No such file"),
        (Prompt("<image>", images=(inline_image(ONE),), image_options={"size": 3.5}), "the image processor fails"),
        (
            Prompt("<image>", images=(inline_image(ONE),), image_options={"sise": 3}),
            "image_options: CLIPImageProcessorPil does not take sise",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tokenizer: HfTokenizer, prompt: Prompt, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read(prompt, tokenizer)


def test_images_need_the_tokenizer_of_a_model() -> None:
    prompt = Prompt("<image>", images=(inline_image(ONE),))
    with pytest.raises(ImageError, match=r"need the tokenizer in a model's folder"):
        asyncio.run(read_prompt(prompt, ByteTokenizer()))


def test_options_reach_the_processor(tokenizer: HfTokenizer) -> None:
    half = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
    prompt = Prompt("<image>", images=(inline_image(ONE),), image_options=half)
    assert read(prompt, tokenizer).ids.tolist() == [IMAGE] * (PATCHES // 4)
    assert read(replace(prompt, image_options={}), tokenizer).ids.tolist() == [IMAGE] * PATCHES


def test_later_turns_continue_after_the_images(tokenizer: HfTokenizer) -> None:
    found = read(Prompt(chat("image"), images=(inline_image(ONE),)), tokenizer)
    conversation = Conversation.begin(found.tokenizer, chat("image"), ())
    np.testing.assert_array_equal(conversation.prompt_ids, found.ids)
    with pytest.raises(ImageError, match="2 placeholders '<image>' for 1 images"):
        Conversation.begin(found.tokenizer, chat("image", "image"), ())


def test_a_request_may_hold_all_images_or_none(tokenizer: HfTokenizer) -> None:
    found = read(Prompt("<image>", images=(inline_image(ONE),)), tokenizer)
    assert found.images_in([65, 66]) is None
    assert found.images_in([*found.ids.tolist(), 66]) is found.images
    for ids in ([IMAGE], [*found.ids.tolist(), IMAGE], found.ids.tolist() * 2):
        with pytest.raises(ImageError, match=r"tokens of an image are not|image tokens without an image"):
            found.images_in(ids)
    with pytest.raises(ImageError, match=f"the model made the token {IMAGE}, which means an image"):
        found.check_response([65, IMAGE])


def test_a_prompt_without_images_has_no_place_for_one(tokenizer: HfTokenizer) -> None:
    found = read(Prompt("an <image> tag"), tokenizer)
    with pytest.raises(ImageError, match=r"names no image: set rows\.images_field"):
        found.images_in(found.ids.tolist())
    with pytest.raises(ImageError, match="which means an image"):
        found.check_response([IMAGE])


@pytest.mark.parametrize("mode", ["I;16", "F", "I"])
def test_pixels_that_would_be_clipped_are_refused(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (3, 3)).save(file, "TIFF")
    with pytest.raises(ImageError, match="save it with 8 bits per channel"):
        open_image(file.getvalue())


def test_images_are_turned_and_transparent_ones_have_a_white_ground() -> None:
    file, upright = io.BytesIO(), Image.Exif()
    upright[0x0112] = 6  # the camera was turned
    Image.new("RGB", (3, 5)).save(file, "PNG", exif=upright)
    assert open_image(file.getvalue()).size == (5, 3)
    file = io.BytesIO()
    Image.new("RGBA", (1, 1), (9, 9, 9, 0)).save(file, "PNG")
    assert open_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)


def test_other_formats_and_huge_pictures_are_refused() -> None:
    with pytest.raises(ImageError, match="not a readable image"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "PNG")
    with pytest.raises(ImageError, match="9000 x 9000 pixels; the limit is"):
        open_image(file.getvalue())

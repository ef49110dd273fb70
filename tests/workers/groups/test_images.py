"""Prompts with images in a worker: all images are in the ids, or the sample fails and says why."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollq.buffer.errors import ImageError
from rollq.buffer.rollouts import ImageRef, Prompt
from rollq.buffer.wire.images import digest_of_image, inline_image
from rollq.workers.agents.conversation import Conversation
from rollq.workers.groups.samples import ReadPrompt, read_prompt
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
    digests = [digest_of_image(ONE), digest_of_image(TWO)]
    assert found.seen() == {"images": digests, "image_processor": "CLIPImageProcessorPil"}
    assert found.images is not None
    assert found.images.collapse(found.ids.tolist()).count(IMAGE) == 2


def test_ids_that_are_given_have_a_placeholder_per_image(tokenizer: HfTokenizer) -> None:
    prompt = Prompt("", ids=(65, IMAGE, 66), images=(inline_image(ONE),))
    assert read(prompt, tokenizer).ids.tolist() == [65, *[IMAGE] * PATCHES, 66]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (Prompt("no place", images=(inline_image(ONE),)), "tokens of an image do not occur"),
        (Prompt("<image>", images=(inline_image(ONE),) * 2), "1 placeholders '<image>' for 2 images"),
        (Prompt("<image><image>", images=(inline_image(ONE),)), "2 placeholders '<image>' for 1 images"),
        (Prompt("<image>", images=(inline_image(b"no image"),)), "a file of 8 bytes is not an image"),
        (Prompt("<image>", images=(ImageRef("file:///gone.png"),)), "No such file"),
        (Prompt("<image>", images=(inline_image(ONE),), image_options={"size": 3.5}), "the image processor fails"),
    ],
)
def test_what_does_not_fit_is_refused(tokenizer: HfTokenizer, prompt: Prompt, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read(prompt, tokenizer)


def test_images_need_the_tokenizer_of_a_model() -> None:
    prompt = Prompt("<image>", images=(inline_image(ONE),))
    with pytest.raises(ImageError, match=r"need the tokenizer of a model's folder, by \[worker\] tokenizer"):
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

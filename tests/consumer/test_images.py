"""The trainer's model gets the images that the engine read, or the batch is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError, ImageError, InvalidGroup
from rollq.buffer.images.processor import ImageProcessor, Images, model_class
from rollq.buffer.values.rollouts import Group, ImageRef, Prompt
from rollq.buffer.wire.images import digest_of_image, inline_image
from rollq.consumer import Batch, ImageInputs
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import start_learner
from rollq.consumer.trainer.ranks import join_ranks
from support.consumer_groups import make_group, make_sample, make_segment
from support.forked_ranks import run_in_ranks
from support.pictures import picture
from support.vision_families import PLACEHOLDERS, make_vision_model

ONE, TWO = picture(9, 9, seed=1), picture(30, 9, seed=2)


@pytest.fixture(scope="module", params=sorted(PLACEHOLDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp(request.param), request.param, seed=0)


def group(folder: Path, *files: bytes, refs: tuple[ImageRef, ...] | None = None, options: Any = None) -> Group:
    """A group of one sample: two letters, and the images of `files`."""
    processor = ImageProcessor(folder)
    placed = processor.place(Images(files, options or {}))
    ids = placed.expand([66, *[placed.placeholder_id] * len(files), 67])
    sample = make_sample(make_segment(ids, [68, 69, 70]))
    prompt = Prompt("?", images=tuple(map(inline_image, files)) if refs is None else refs, image_options=options or {})
    return replace(make_group(sample), prompt=prompt)


def micro_batch(batch: Batch, folder: Path, *, padded: bool = True) -> MicroBatch:
    [micro] = batch.micro_batches(10_000, padded=padded)
    return ImageInputs(ImageProcessor(folder)).add(micro, batch)


def alone(model: Any, processor: ImageProcessor, one: Group) -> list[float]:
    """The logprobs of a group's response, by a forward pass of its own."""
    segment = one.samples[0].segments[0]
    ids = torch.tensor([[*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]])
    images = Images.read(one.prompt.images, one.prompt.image_options)
    inputs: Mapping[str, Any] = processor.inputs(ids, [images]) if images.files else {}
    logprobs = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].log_softmax(-1)
    places = torch.arange(len(segment.prompt_ids) - 1, ids.shape[1] - 1)
    found: list[float] = logprobs[places, torch.from_numpy(segment.response_ids).long()].tolist()
    return found


@torch.no_grad()
def test_rows_with_one_two_and_no_images_are_read_together(folder: Path) -> None:
    groups = [group(folder, ONE), group(folder), group(folder, TWO, ONE), group(folder, TWO)]
    batch = Batch.build(1, groups)
    model = model_class(folder).from_pretrained(folder, dtype=torch.float32).eval()
    micro = micro_batch(batch, folder)
    found = token_logprobs(model, micro).logprobs
    expected = [logprob for one in micro.sequences for logprob in alone(model, ImageProcessor(folder), groups[one])]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_a_batch_without_images_is_left_as_it_is(folder: Path) -> None:
    batch = Batch.build(1, [group(folder)])
    assert micro_batch(batch, folder, padded=False).inputs == {}


def test_packed_rows_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set \[trainer\] layout = 'padded'"):
        micro_batch(Batch.build(1, [group(folder, ONE)]), folder, padded=False)


def test_a_file_that_has_changed_since_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(ONE)
    batch = Batch.build(1, [group(folder, ONE, refs=(ImageRef(path.as_uri(), digest_of_image(ONE)),))])
    assert micro_batch(batch, folder).inputs
    path.write_bytes(TWO)
    with pytest.raises(ImageError, match=r"group 0 of task 'math': image .* sha256 is .* restore it"):
        micro_batch(batch, folder)
    path.unlink()
    with pytest.raises(ImageError, match="No such file"):
        micro_batch(batch, folder)


def test_tokens_of_an_image_without_one_are_refused(folder: Path) -> None:
    one = replace(group(folder, ONE), prompt=Prompt("?"))
    with pytest.raises(InvalidGroup, match="group 0 of task 'math' has image tokens, but its prompt has no image"):
        micro_batch(Batch.build(1, [one]), folder)


def test_a_loss_without_the_images_is_refused(folder: Path) -> None:
    [micro] = Batch.build(1, [group(folder, ONE)]).micro_batches(10_000, padded=True)
    with pytest.raises(ConfigError, match=r"add them with rollq\.consumer\.ImageInputs"):
        token_logprobs(None, micro)


def test_images_that_another_class_processed_are_refused(folder: Path) -> None:
    """Where torchvision is installed, transformers takes another one, whose pixels differ."""
    one = group(folder, ONE)
    sample = replace(one.samples[0], extra={**one.samples[0].extra, "image_processor": "OtherImageProcessor"})
    with pytest.raises(
        ConfigError, match="workers processed images with OtherImageProcessor, but the trainer would use"
    ):
        micro_batch(Batch.build(1, [replace(one, samples=(sample,))]), folder)


def test_sequences_name_the_images_and_how_they_are_processed(folder: Path) -> None:
    batch = Batch.build(1, [group(folder, ONE, TWO, options={"do_convert_rgb": True})])
    [sequence] = batch.sequences
    assert sequence.images == (inline_image(ONE), inline_image(TWO))
    assert sequence.image_options == {"do_convert_rgb": True}


def test_moving_a_micro_batch_moves_the_pixels(folder: Path) -> None:
    micro = micro_batch(Batch.build(1, [group(folder, ONE)]), folder).to("meta")
    assert {tensor.device.type for tensor in micro.inputs.values()} == {"meta"}


def train_in_rank(folder: Path, log: Path) -> None:
    """Compute the gradient of a group with an image and of one without, each on another rank."""
    settings = TrainerSettings(model=folder, output=log / "out", steps=1, threads=1)
    with join_ranks("cpu") as ranks:
        _, learner = start_learner(settings, 0, ranks)
        groups = [group(folder, picture(9, 9, seed=1)), replace(group(folder), group_id=1)]
        batch = Batch.build(1, groups, rank=ranks.rank, world_size=ranks.world_size, reduction="mean")
        for begin in (lambda: learner.parts(batch), lambda: learner.gradients(batch, LossMetrics(), None, Event())):
            with pytest.raises(ConfigError) as refused:
                begin()
            (log / f"rank-{ranks.rank}").write_text(str(refused.value))


@pytest.mark.slow  # two processes that load the model
def test_images_on_several_ranks_are_refused_on_all_of_them(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model", "llava", seed=0)
    assert run_in_ranks(2, train_in_rank, folder, tmp_path) == [0, 0]
    for rank in range(2):
        assert (
            (tmp_path / f"rank-{rank}")
            .read_text()
            .startswith(
                "step 1 has images in its prompts, which `rollq train` trains on in one process only: start it without"
            )
        )

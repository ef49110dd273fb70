"""The images of a micro-batch as model inputs. Needs transformers, torch and Pillow."""

from dataclasses import replace
from functools import lru_cache

from rollq.buffer.errors import ConfigError, ImageError, InvalidGroup
from rollq.buffer.images.processor import ImageProcessor, Images
from rollq.buffer.wire.images import read_image
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.batches.sequences import TokenSequence

KEPT = 32
"""How many image files are kept in memory."""


class ImageInputs:
    """Adds the pixels of images to micro-batches, with the processor in a model's folder."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._read = lru_cache(KEPT)(read_image)

    def add(self, micro: MicroBatch, batch: Batch) -> MicroBatch:
        """Return `micro`, a micro-batch of `batch`, with the inputs for its images; unchanged without images.

        Raises `ConfigError` for packed rows, and if the workers processed the images with another class; `ImageError`
        for a file that cannot be read, or differs from the engine's; `InvalidGroup` for image tokens in a sequence
        without images.
        """
        chosen = [batch.sequences[index] for index in micro.sequences]
        rows = [sequence for sequence in chosen if self._processor.image_token_id in sequence.ids]
        if not rows:
            return replace(micro, lacks_images=False)
        if micro.attention_mask is None:
            raise ConfigError("prompts with images need one sequence per row: set [trainer] layout = 'padded'")
        by = {batch.samples[row.sample].extra.get("image_processor", self._processor.name) for row in rows}
        if other := by - {self._processor.name}:
            raise ConfigError(
                f"workers processed images with {min(other)}, but the trainer would use {self._processor.name}: "
                "install torchvision for both or for neither"
            )
        inputs = self._processor.inputs(micro.input_ids, list(map(self._images, rows)))
        return replace(micro, inputs=inputs, lacks_images=False)

    def _images(self, row: TokenSequence) -> Images:
        name = f"group {row.group_id} of task {row.task!r}"
        if not row.images:
            raise InvalidGroup(f"{name} has image tokens, but its prompt has no image")
        try:
            return Images(tuple(map(self._read, row.images)), row.image_options)
        except ImageError as error:
            raise ImageError(f"{name}: {error}; restore it, and start the trainer again") from error

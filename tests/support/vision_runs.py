"""Requests with images, and plain forward passes over the same files to compare with."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollq.buffer.images.processor import ImageProcessor, Images, PlacedImages, model_class
from rollq.buffer.values.rollouts import Float32Array
from rollq.workers.agents.image_prompts import ImageTokenizer
from rollq.workers.engines.protocol import Completion, Request, Sampling
from rollq.workers.tokenizers.hugging_face import HfTokenizer


def images_of(folder: Path, *files: bytes, options: Mapping[str, Any] | None = None) -> PlacedImages:
    """The files as images for the model in `folder`."""
    return _processor(folder).place(Images(files, options or {}))


def request(folder: Path, text: str, images: PlacedImages | None, tokens: int = 12, seed: int = 0) -> Request:
    """A request with the text, in which each placeholder is one of `images`."""
    tokenizer = HfTokenizer(folder)
    ids = tokenizer.encode(text) if images is None else ImageTokenizer(tokenizer, images).encode(text)
    sampling = Sampling(max_tokens=tokens, seed=seed, ignore_eos=True)
    return Request(np.array(ids, np.int32), sampling, images=images)


def plain_logprobs(folder: Path, one: Request, made: Sequence[int]) -> Float32Array:
    """The logprobs float32 [R] of response tokens by one forward pass of transformers."""
    ids = torch.tensor([[*one.prompt_ids.tolist(), *made]])
    inputs: Mapping[str, Any] = {}
    if one.images is not None:
        inputs = _processor(folder).inputs(ids, [one.images.images])
    with torch.no_grad():
        logits = _model(folder)(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
    places = torch.arange(len(one.prompt_ids) - 1, ids.shape[1] - 1)
    logprobs: Float32Array = logits.log_softmax(-1)[places, torch.tensor(made)].numpy()
    return logprobs


def worst_error(folders: Sequence[Path], one: Request, completion: Completion) -> float:
    """The largest difference of a logprob from that of the weights `folders[version]` that it claims."""
    made, start, worst = completion.ids.tolist(), 0, 0.0
    for span in completion.versions:
        end = start + span.tokens
        expected = plain_logprobs(folders[span.version], one, made)[start:end]
        worst = max(worst, float(np.abs(expected - completion.logprobs[start:end]).max()))
        start = end
    return worst


@cache
def _model(folder: Path) -> Any:
    return model_class(folder).from_pretrained(folder, dtype=torch.float32).eval()


@cache
def _processor(folder: Path) -> ImageProcessor:
    return ImageProcessor(folder)

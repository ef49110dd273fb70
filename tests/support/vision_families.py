"""Tiny vision-language models of several families, with random weights and real processors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor

from rollq.cli.demo.tiny_model import EOS, PAD, make_tokenizer
from support.model_families import SHAPE, VOCABULARY

IMAGE_PIXELS, PATCH_PIXELS = 56, 14
"""Sides of the square that an image is resized to, and of a patch."""
PATCHES = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
SPECIAL = ("<image>", "<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Tokens that surround images or stand for them; their ids come after those of the bytes."""
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
"""Tokens of one to four newlines, which vLLM looks for in the vocabulary of Gemma 3."""
IMAGE, BEGIN, END = range(VOCABULARY, VOCABULARY + 3)
PLACEHOLDERS = {"llava": "<image>", "idefics3": "<image>", "gemma3": "<boi>"}
"""Stands for one image in the text of a prompt, before the processor expands it."""
SHARPER = 3.0
"""Added to the weight of the last norm, so that the special tokens, whose logits are zero, are hardly ever sampled."""

TEXT: Mapping[str, Any] = {**SHAPE, "vocab_size": VOCABULARY + len(SPECIAL) + len(NEWLINES)}
TOWER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_PIXELS,
    "patch_size": PATCH_PIXELS,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
        "image_seq_length": PATCHES,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "idefics3_vision"},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**TEXT, "model_type": "gemma3_text", "sliding_window": 32, "query_pre_attn_scalar": 32},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
        "mm_tokens_per_image": PATCHES // 4,
    },
}


def make_vision_model(folder: Path, family: str, *, seed: int) -> Path:
    """A random model of a family with its processor, in `folder`. It takes images of any size."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**FAMILIES[family])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.add_(noise) if parameter.dim() == 1 else parameter.copy_(noise)
        model.get_decoder().norm.weight.add_(SHARPER)
        model.get_output_embeddings().weight[VOCABULARY:] = 0
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = TEXT["eos_token_id"], 0
    model.save_pretrained(folder)
    _rename_tower(folder / "model.safetensors")
    make_processor(family).save_pretrained(folder)
    return folder


def _rename_tower(file: Path) -> None:
    """Name the tensors of the vision tower as published models do, and as vLLM wants them.

    transformers writes these names again when it saves a model that it has loaded with them.
    """
    tensors = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def make_processor(family: str) -> Any:
    """The processor of a family, with images of `PATCHES` patches and a byte-level tokenizer."""
    tokenizer = make_vision_tokenizer()
    template = chat_template(PLACEHOLDERS[family])
    square = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    match family:
        case "llava":
            return LlavaProcessor(
                CLIPImageProcessorPil(size=square, crop_size=square),
                tokenizer,
                patch_size=PATCH_PIXELS,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
                chat_template=template,
            )
        case "idefics3":
            images = Idefics3ImageProcessorPil(
                size={"longest_edge": IMAGE_PIXELS},
                max_image_size={"longest_edge": IMAGE_PIXELS},
                do_image_splitting=False,
            )
            return Idefics3Processor(images, tokenizer, image_seq_len=PATCHES // 4, chat_template=template)
        case "gemma3":
            return Gemma3Processor(
                Gemma3ImageProcessorPil(size=square),
                tokenizer,
                chat_template=template,
                image_seq_length=PATCHES // 4,
            )
    raise ValueError(f"there is no tiny vision model of the family {family!r}")


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then `SPECIAL` and `NEWLINES`."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(list(NEWLINES))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=TEXT["max_position_embeddings"],
        extra_special_tokens=dict(zip(("image_token", "boi_token", "eoi_token"), SPECIAL, strict=False)),
    )


def chat_template(placeholder: str) -> str:
    """A template of messages whose content is a string, or a list of strings and images."""
    return (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + placeholder + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

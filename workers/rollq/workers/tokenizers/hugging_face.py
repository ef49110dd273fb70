"""Implements the `Tokenizer` protocol for Hugging Face folders, and computes fingerprints of tokenizers and models.

Invariant: two roles with the same fingerprints turn the same text into the same ids, and build the same network. The
run compares fingerprints at registration. Nothing here uses the network.
"""

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import orjson

from rollq.buffer.errors import ConfigError
from rollq.buffer.images.processor import ImageProcessor, has_images
from rollq.workers.tokenizers.templates import check_options, options_text, read_template

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# Fields of config.json that do not describe the network.
NOT_ARCHITECTURE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)


class HfTokenizer:
    """`Tokenizer` over a folder written by `save_pretrained`."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        """`chat_template` is a file with a template that replaces the folder's.

        Raises `ConfigError` if the folder has no fast tokenizer, the template cannot be read, parsed or used with the
        tokenizer, or transformers is not installed.
        """
        _read(folder, TOKENIZER_FILE)
        try:
            from transformers import AutoTokenizer  # only workers with such a tokenizer need the package
        except ModuleNotFoundError as error:
            raise ConfigError(f"a tokenizer needs the package {error.name!r}: pip install 'rollq[torch]'") from error
        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._options: Mapping[str, Any] = {}
        self._with_options: dict[str, Self] = {}
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)  # Mistral's tokenizer has none
        if chat_template is not None:
            if self._fast is None:
                raise ConfigError(f"worker.chat_template: the tokenizer in {str(folder)!r} renders without templates")
            self._tokenizer.chat_template = read_template(chat_template)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        tokenizer_eos = self._tokenizer.eos_token_id
        self._eos_ids = model_eos_ids(folder) | ({tokenizer_eos} if tokenizer_eos is not None else set())

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """This tokenizer with values for the chat template's variables. Returns the same object for the same options.

        Raises `ConfigError` if there is no template, and for a name that the template never reads.
        """
        key = options_text(options)
        if key not in self._with_options:
            if self.chat_template is None:
                raise ConfigError(
                    f"rows.template_options: the tokenizer in {str(self._folder)!r} has no chat template that takes "
                    "options; leave it out"
                )
            check_options(self.chat_template, options)
            other = copy.copy(self)
            other._options, other._with_options = dict(options), {}
            self._with_options[key] = other
        return self._with_options[key]

    @cached_property
    def reserved(self) -> frozenset[int]:
        """Tokens that represent images; empty if the model reads no images or its processor cannot be used."""
        try:
            return self.images.reserved if has_images(self._folder) else frozenset()
        except ConfigError as error:
            log.warning("prompts can have no images: %s", error)
            return frozenset()

    @cached_property
    def images(self) -> ImageProcessor:
        """The image processor in the same folder. Raises `ConfigError` if there is none."""
        return ImageProcessor(self._folder)

    @property
    def backend(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, without beginning or end tokens."""
        ids: list[int]
        if self._fast is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:  # without token offsets, encoding takes half the time
            ids = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of `text` with the special tokens that transformers and vLLM put around a prompt, such as BOS. If
        `text` already starts with these tokens, none are added.
        """
        ids, whole = self.encode(text), self._encode_whole(text)
        return ids if ids[:1] == whole[:1] else whole

    def _encode_whole(self, text: str) -> list[int]:
        ids: list[int]
        if self._fast is None:
            ids = self._tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = self._fast.encode_batch_fast([text], add_special_tokens=True)[0].ids
        return ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `special`."""
        text: str
        if self._fast is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        else:  # transformers checks each id first, which takes longer than decoding
            text = self._fast.decode(ids, skip_special_tokens=not special)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation and tool definitions with the chat template, up to the start of the assistant's turn.

        Raises `ConfigError` if the tokenizer has no chat template.
        """
        return self._rendered(messages, tools, add_generation_prompt=True)

    @property
    def template_options(self) -> Mapping[str, Any]:
        """See `Tokenizer.template_options`."""
        return self._options

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **how: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer in {str(self._folder)!r} has no chat template: use prompts that are text, or name a "
                "template with [worker] chat_template"
            )
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            **how,
            **self._options,
        )
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of what `render` returns."""
        return self.encode(self.render(messages, tools))

    def chat_continued(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation, without the end of the assistant's last message, so that the model continues the
        message."""
        return self.encode(self._rendered(messages, tools, continue_final_message=True))

    @property
    def chat_template(self) -> str | None:
        """See `Tokenizer.chat_template`. If there are several templates, this is the one for tools."""
        try:
            template: str = self._tokenizer.get_chat_template(tools=[])
        except ValueError:
            return None
        return template

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a response, from the tokenizer and the model's generation config."""
        return self._eos_ids

    @property
    def eos_id(self) -> int:
        """The tokenizer's end-of-sequence id, otherwise the model's smallest one. Raises `ConfigError` if there is
        none."""
        own: int | None = self._tokenizer.eos_token_id
        if own is None and not self._eos_ids:
            raise ConfigError(f"the tokenizer in {str(self._folder)!r} has no end-of-sequence token: add one")
        return min(self._eos_ids) if own is None else own


def model_eos_ids(folder: Path) -> frozenset[int]:
    """The model folder's end-of-sequence ids, from generation_config.json, otherwise from config.json."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        if (folder / name).exists():
            eos = _read(folder, name).get("eos_token_id")
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def tokenizer_fingerprint(folder: Path) -> str:
    """The sha256 of tokenizer.json's content. Whitespace and the order of keys do not count."""
    return _digest(_read(folder, TOKENIZER_FILE))


def model_fingerprint(folder: Path) -> str:
    """The sha256 of the architecture in config.json, without weights: all of a model's checkpoints share it."""
    config = _read(folder, CONFIG_FILE)
    return _digest({key: value for key, value in config.items() if key not in NOT_ARCHITECTURE})


def model_vocabulary(folder: Path) -> int | None:
    """The number of token ids that the model in a folder has, from config.json; None if unknown.

    Raises `ConfigError` for a folder without a model.
    """
    config = _read(folder, CONFIG_FILE)
    size: int | None = config.get("text_config", config).get("vocab_size")
    return size


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file in the folder. Raises `ConfigError` if the file is missing or holds no object."""
    path = folder / name
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}; give the folder that save_pretrained wrote") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} holds no JSON object; give the folder that save_pretrained wrote")
    return content

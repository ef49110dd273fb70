"""The tokenizer adapter and the fingerprints by which roles find out that they disagree."""

import shutil
from pathlib import Path

import orjson
import pytest
from tokenizers.processors import TemplateProcessing

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt
from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from rollq.workers.agents.conversation import Conversation
from rollq.workers.agents.loops import prompt_tokens
from rollq.workers.tokenizers.hugging_face import HfTokenizer, model_fingerprint, tokenizer_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, make_model(258, seed=0), make_tokenizer())
    return tmp_path


def rewrite(path: Path, **changes: object) -> None:
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes, option=orjson.OPT_INDENT_2))


@pytest.mark.parametrize("text", ["12+34=", "sort 3142=", "", " two  spaces\n", "naïve ≤ 日本 🙂"])
def test_text_survives_encoding_without_extra_tokens(folder: Path, text: str) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_special_tokens_are_left_out_of_text(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    (eos,) = tokenizer.eos_ids
    assert tokenizer.decode([*tokenizer.encode("46"), eos]) == "46"


def test_eos_ids_are_those_of_tokenizer_and_generation_config(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[5, 6])
    assert HfTokenizer(folder).eos_ids == {1, 5, 6}


def test_a_conversation_ends_where_the_assistant_begins(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    ids = tokenizer.chat([{"role": "user", "content": "12+34="}])
    assert tokenizer.decode(ids) == "user: 12+34=\nassistant: "


def test_a_tokenizer_without_chat_template_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        HfTokenizer(folder).chat([{"role": "user", "content": "hello"}])


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        HfTokenizer(tmp_path)


def test_fingerprints_see_content_and_not_its_form(folder: Path) -> None:
    tokenizer, model = tokenizer_fingerprint(folder), model_fingerprint(folder)
    rewrite(folder / "tokenizer.json")
    rewrite(folder / "config.json", transformers_version="0.0", dtype="bfloat16")
    assert (tokenizer_fingerprint(folder), model_fingerprint(folder)) == (tokenizer, model)


def test_fingerprints_see_another_vocabulary_and_another_architecture(folder: Path) -> None:
    tokenizer, model = tokenizer_fingerprint(folder), model_fingerprint(folder)
    rewrite(folder / "tokenizer.json", added_tokens=[])
    rewrite(folder / "config.json", num_hidden_layers=3)
    assert tokenizer_fingerprint(folder) != tokenizer
    assert model_fingerprint(folder) != model


def test_fingerprints_do_not_see_weights(folder: Path) -> None:
    before = model_fingerprint(folder)
    save(folder, make_model(258, seed=1), make_tokenizer())
    assert model_fingerprint(folder) == before


@pytest.mark.parametrize("text", ["", " a  b\n", "12+34=<eos>user: ", "naïve 東京 🙂\u0301", "x" * 10_000])
def test_text_has_the_ids_that_transformers_gives_it(folder: Path, text: str) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.encode(text) == tokenizer.backend.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("ids", [[], [1], [0, 1, 257], [228, 184], [40, 1, 0, 41], list(range(258)), [99_999]])
def test_ids_have_the_text_that_transformers_gives_them(folder: Path, ids: list[int], special: bool) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.decode(ids, special=special) == tokenizer.backend.decode(ids, skip_special_tokens=not special)


def test_a_limit_of_the_saved_tokenizer_does_not_cut_text(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    saved = orjson.loads((copied / "tokenizer.json").read_bytes())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (copied / "tokenizer.json").write_bytes(orjson.dumps(saved))
    assert len(HfTokenizer(copied).encode("12345")) == 5


def test_a_text_prompt_begins_with_bos_where_the_tokenizer_puts_one_before_texts(folder: Path) -> None:
    plain = make_tokenizer()
    bos, eos = plain.eos_token_id, plain.eos_token
    plain.backend_tokenizer.post_processor = TemplateProcessing(single=f"{eos} $A", special_tokens=[(eos, bos)])
    plain.save_pretrained(folder)
    tokenizer = HfTokenizer(folder)
    assert (
        prompt_tokens(Prompt("2+2="), tokenizer).tolist() == plain("2+2=").input_ids == [bos, *tokenizer.encode("2+2=")]
    )
    assert prompt_tokens(Prompt(f"{eos}2+2="), tokenizer).tolist() == [bos, *tokenizer.encode("2+2=")]
    assert tokenizer.chat([{"role": "user", "content": "2+2="}])[0] != bos


def test_a_text_prompt_has_no_further_tokens_where_the_tokenizer_adds_none(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    assert prompt_tokens(Prompt("2+2="), tokenizer).tolist() == tokenizer.encode("2+2=")


def test_the_model_continues_messages_that_end_with_the_assistants(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    messages = ({"role": "user", "content": "12+34="}, {"role": "assistant", "content": "It is "})
    assert tokenizer.decode(prompt_tokens(Prompt(messages), tokenizer).tolist()) == "user: 12+34=\nassistant: It is "
    with pytest.raises(ValueError, match="only the agent loop single_turn continues"):
        Conversation.begin(tokenizer, messages, ())

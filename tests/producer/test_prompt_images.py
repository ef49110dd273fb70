"""Images in rows: however they are named, the prompt gets references with checksums, and a part for each."""

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.values.rollouts import ImageRef, Prompt
from rollq.buffer.wire.images import digest_of_image, inline_image
from rollq.producer.prompts import PromptFile
from rollq.producer.settings import PromptSettings
from support.pictures import picture

SMALL, LARGE, HUGE = picture(1, 1, seed=0), picture(90, 90, seed=1), picture(700, 700, seed=2)
LARGE_CUT = f"data:;base64,{base64.b64encode(LARGE[:30]).decode()}"
DIGEST = digest_of_image(LARGE)
PART = {"type": "image"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.png").write_bytes(SMALL)
    (tmp_path / "large.png").write_bytes(LARGE)
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    return tmp_path


def read(folder: Path, row: Any, **settings: Any) -> Prompt:
    """The prompt of a row of a file in `folder`."""
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    given = {"prompts": folder / "prompts.jsonl", "answer_field": "", **settings}
    with PromptFile(PromptSettings.model_validate(given)) as file:
        return file.prompt(0)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_small_files_travel_in_the_prompt_and_large_ones_by_path(folder: Path) -> None:
    prompt = read(folder, {"prompt": "x", "images": ["small.png", str(folder / "large.png")]})
    assert prompt.images == (inline_image(SMALL), ImageRef((folder / "large.png").as_uri(), DIGEST))
    assert prompt.metadata == {}


def test_urls_with_a_checksum_are_left_to_the_worker(folder: Path) -> None:
    prompt = read(folder, {"prompt": "x", "images": {"url": "https://x/z.png", "sha256": DIGEST}})
    assert prompt.images == (ImageRef("https://x/z.png", DIGEST),)


def test_files_may_have_urls(folder: Path) -> None:
    images = [(folder / name).as_uri() for name in ("small.png", "large.png")]
    assert read(folder, {"prompt": "x", "images": images}).images == (inline_image(SMALL), ImageRef(images[1], DIGEST))


def test_texts_without_images_may_have_marks(folder: Path) -> None:
    assert read(folder, {"prompt": "an <image> tag"}, chat=True).content == (
        {"role": "user", "content": "an <image> tag"},
    )


def test_marks_in_parts_are_the_places_of_images(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": [text("a <image>"), text("b")]}], "images": "small.png"}
    assert read(folder, row).content == ({"role": "user", "content": [text("a "), PART, text("b")]},)


def test_data_urls_lose_their_type(folder: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"
    assert read(folder, {"prompt": "x", "images": url}).images == (inline_image(SMALL),)


def test_marks_in_texts_are_the_places_of_images(folder: Path) -> None:
    row = {"prompt": "<image>is <image>?", "images": ["small.png", "small.png"]}
    content = [PART, text("is "), PART, text("?")]
    assert read(folder, row, chat=True).content == ({"role": "user", "content": content},)


def test_without_marks_images_come_before_the_users_first_text(folder: Path) -> None:
    row = {"prompt": "why?", "images": ["small.png", "small.png"]}
    assert read(folder, row, chat=True, system_prompt="Be brief.").content == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [PART, PART, text("why?")]},
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "large.png"},
        {"type": "image", "path": "large.png", "text": None},
        {"type": "image_url", "image_url": {"url": "large.png"}},
        {"type": "image_url", "image_url": "large.png"},
    ],
)
def test_parts_of_messages_may_name_images(folder: Path, part: Any) -> None:
    prompt = read(folder, {"messages": [{"role": "user", "content": [text("a"), part]}]})
    assert prompt.content == ({"role": "user", "content": [text("a"), PART]},)
    assert [image.sha256 for image in prompt.images] == [DIGEST]


def test_parts_may_be_places_for_images_of_the_column(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": [text("a"), PART]}], "images": "large.png"}
    prompt = read(folder, row)
    assert prompt.content == ({"role": "user", "content": [text("a"), PART]},)
    assert [image.sha256 for image in prompt.images] == [DIGEST]


def test_options_belong_to_prompts_with_images(folder: Path) -> None:
    options = {"size": {"longest_edge": 64}}
    assert read(folder, {"prompt": "x", "images": "small.png"}, image_options=options).image_options == options
    assert read(folder, {"prompt": "x"}, image_options=options).image_options == {}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "images": "gone.png"}, "gone.png' cannot be read"),
        ({"prompt": "x", "images": [3]}, "field 'images': an image is a path"),
        ({"prompt": "x", "images": {"sha256": "0" * 64}}, "an image is a path"),
        ({"prompt": "x", "images": {"path": "large.png", "sha256": "0" * 64}}, "the row says 0"),
        ({"prompt": "x", "images": "http://x/y.png"}, "only file:///, https:// and data:;base64, can be read"),
        ({"prompt": "x", "images": "https://127.0.0.1:1/y.png"}, "refused"),
        ({"prompt": "x", "images": {"url": "https://x/y.png", "sha256": "ABC"}}, "sha256 must be 64 hex digits"),
        ({"prompt": "x", "images": {"url": "https://x/y.png", "sha256": 5}}, "sha256 must be 64 hex digits"),
        ({"prompt": "x", "images": "data:image/svg+xml,<svg/>"}, "must have base64 data"),
        ({"prompt": "x", "images": "data:image/png;base64,"}, "is empty"),
        ({"prompt": "x", "images": "file:///gone.png"}, "is not in .*: name its folder in rows.image_folders"),
        ({"prompt": "x", "images": "file://elsewhere/gone.png"}, "on another machine"),
        ({"prompt": "x", "images": "text.png"}, "image 'text.png': a file of 4 bytes is not a readable image"),
        ({"prompt": "x", "images": "data:image/png;base64,cm9vdDp4"}, "a file of 6 bytes is not a readable image"),
        ({"prompt": "x", "images": LARGE_CUT}, "is not a readable image"),
        ({"prompt": "x", "images": "a\0b.png"}, "cannot be read"),
        ({"prompt": "x", "images": "file:///a%00b.png"}, "cannot be read"),
        ({"prompt": "x", "images": "circle.png"}, "cannot be read"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "names no image: set rows.images_field"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": None}]}]}, "names no image"),
        ({"prompt": "<image>", "images": ["small.png"] * 2}, "1 places for 2 images"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": ""}]}]}, "an image is a path"),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image", "path": "small.png"}]}],
                "images": "small.png",
            },
            "name them once",
        ),
        ({"messages": [{"role": "system", "content": "x"}], "images": "small.png"}, "no user message"),
        (
            {"prompt": "x", "images": inline_image(HUGE).url},
            "holds an image of .* bytes, more than 1,048,576: name a file",
        ),
    ],
)
def test_bad_images_make_the_row_unusable(folder: Path, row: Any, problem: str) -> None:
    with pytest.raises(InvalidPrompt, match=problem):
        read(folder, row, chat=True)


def test_files_of_datasets_may_hold_the_bytes(folder: Path) -> None:
    import datasets

    rows = {"prompt": ["x"], "images": [[{"bytes": SMALL, "path": "name.png"}]]}
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image(decode=False))}
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "prompts.parquet"))
    settings = PromptSettings(prompts=folder / "prompts.parquet", answer_field="")
    with PromptFile(settings) as file:
        assert file.prompt(0).images == (inline_image(SMALL),)


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that is not beside the prompts."""
    path = tmp_path_factory.mktemp("elsewhere") / "secret.png"
    path.write_bytes(SMALL)
    return path


def ways_out(folder: Path, secret: Path) -> list[Any]:
    """All ways in which a row can name a file outside the folder of its prompts."""
    (folder / "link.png").symlink_to(secret)
    (folder / "linked").symlink_to(secret.parent)
    beyond = Path(os.path.relpath(secret, folder))
    return [
        str(secret),
        str(beyond),
        f"linked/../{secret.parent.name}/secret.png",
        "link.png",
        "linked/secret.png",
        secret.as_uri(),
        f"file://localhost{secret}",
        (folder / "link.png").as_uri(),
        f"file://{folder}/..%2f{secret.parent.name}/secret.png",
        f"/proc/self/root{secret}",
        f"/proc/{os.getpid()}/cwd/{os.path.relpath(secret)}",
        {"path": str(secret), "sha256": digest_of_image(SMALL)},
        "/proc/self/environ",
        "/etc/passwd",
    ]


def test_files_elsewhere_are_not_read(folder: Path, secret: Path) -> None:
    for way in ways_out(folder, secret):
        with pytest.raises(InvalidPrompt, match=r"is not in .*: name its folder in rows.image_folders of the task"):
            read(folder, {"prompt": "x", "images": way})


def test_folders_of_images_may_be_named(folder: Path, secret: Path) -> None:
    *images, _, _ = ways_out(folder, secret)
    for way in images:
        assert read(folder, {"prompt": "x", "images": way}, image_folders=[secret.parent]).images
    for way in ("/proc/self/environ", "/etc/passwd"):
        with pytest.raises(InvalidPrompt, match="is not a readable image"):
            read(folder, {"prompt": "x", "images": way}, image_folders=["/"])


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder / "small.png")
    assert read(folder, {"prompt": "x", "images": "link.png"}).images == (inline_image(SMALL),)


def test_without_pillow_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollq\[images\]'"):
        read(folder, {"prompt": "x", "images": "small.png"})

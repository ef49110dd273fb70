"""`rollq groups show`, from the shell's words to what is shown."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    GroupResult,
    ImageRef,
    Lease,
    Prompt,
    Sample,
    SamplePart,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from rollq.cli.main import main
from rollq.monitor.text.terminal import escaped
from support.buffer_run import World, make_sample

Show = Callable[..., Result]


@pytest.fixture
def show(server_url: str, run_name: str) -> Show:
    def run(*words: object) -> Result:
        return CliRunner().invoke(
            main, ["groups", "show", *[str(word) for word in words], "--url", server_url, "--run", run_name]
        )

    return run


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer)


def lines_of(shown: Result) -> list[str]:
    assert shown.exit_code == 0, shown.output
    return [re.sub(r"[+-]?\b\d+(\.\d+)? s\b", "<time>", line.strip()) for line in shown.output.splitlines()]


def put(world: World, *samples: Sample, **facts: object) -> Lease:
    """Admit a group and put these samples."""
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, samples, **facts)])  # type: ignore[arg-type]
    return lease


def test_a_trained_group_has_its_whole_life_and_its_samples(world: World, show: Show) -> None:
    world.start()
    world.admit(2)
    leases = world.lease(2, worker="gpu0-ab12")
    segment = Segment(
        np.array([1, 2], np.int32), np.arange(3, dtype=np.int32), np.zeros(3, np.float32),
        (VersionSpan(1, 0, 3),), np.array([True, False, True]),
    )  # fmt: skip
    sample = Sample(
        (segment,), SampleStatus.COMPLETED, None, 0.5, {"exact": 1.0, "length": -0.5}, "forty-two",
        extra={"worker": "gpu0-ab12", "judge": "exact_match", "judge_s": 0.25},
    )  # fmt: skip
    world.buffer.put([GroupResult(lease, (sample, sample)) for lease in leases])
    world.train(1)
    lines = lines_of(show("math", 1))
    assert lines[0] == "group 1 of math: archived, reward 0.500"
    assert lines[3:8] == [
        "<time>  admitted for step 1",
        "<time>  leased to gpu0-ab12 with version 0 (attempt 1)",
        "<time>  put, after <time>",
        "<time>  claimed for step 1",
        "<time>  trained: step 1 was committed",
    ]
    assert lines[9:12] == ["prompt", "| math 0", "answer  0"]
    assert lines[13:18] == [
        "sample 0: completed, reward 0.500",
        "3 tokens: 3 of version 0; the loss counts 2",
        "reward parts: exact 1.000, length -0.500",
        "made by gpu0-ab12, judged by exact_match in <time>",
        "| forty-two",
    ]
    view = orjson.loads(show("math", 1, "--json").output)
    assert (view["step"], view["reward"], view["status"]) == (1, 0.5, "archived")
    assert view["samples"][1]["segments"] == [
        {"prompt_ids": [1, 2], "ids": [0, 1, 2], "pieces": None, "versions": [0, 0, 0],
         "counts": [True, False, True], "logprobs": [0.0, 0.0, 0.0]}
    ]  # fmt: skip


def make_every_status(world: World) -> dict[Status, int]:
    """A group in each status: status -> number."""
    world.start(math={"max_uses": 2, "max_staleness": 4, "reuse_cooldown_steps": 2, "archive": True})
    buffer, made = world.buffer, make_sample(0)
    broken = Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="judge: no number")
    world.complete(6)
    world.train(1)
    buffer.checkpoint(world.held, 1)
    world.train(2)
    world.claim(3)
    put(world, made, made)
    put(world, made, make_sample(0, status="a"))
    put(world, broken, broken)
    put(world, made, made, filtered=True)
    expired = put(world, make_sample(0, status="a"), made).group_id
    keys = task_keys(buffer.run, "math")
    buffer.client.zrem(keys.status(Status.ABORTED), expired)
    buffer.client.zrem(keys.by_version, expired)
    buffer.client.zadd(keys.status(Status.EXPIRED), {str(expired): expired})
    buffer.client.hset(keys.group(expired), "status", "expired")
    batch = buffer.open_batch("math", "batch", "train", step=4)
    buffer.fill_batch("math", batch.handle, 0, [Prompt("batched")], last=True)
    world.put(world.lease(1))
    world.admit(2)
    world.lease(1)
    found = {status: buffer.newest("math", status) for status in Status}
    return {status: group_id for status, group_id in found.items() if group_id is not None}


def test_groups_of_every_status_can_be_shown(world: World, show: Show) -> None:
    numbers = make_every_status(world)
    assert numbers.keys() == set(Status)
    for status, number in numbers.items():
        lines = lines_of(show("math", "--last", status.value))
        assert lines == lines_of(show("math", number))
        assert lines[0].startswith(f"group {number} of math: {status}")
    failed = show("math", "--last", "failed").output
    assert "\nerror\n  judge: no number\n" in failed
    assert "\nsample 0: failed (grader)" in failed
    assert "  now  failed: it is not trained, but kept for inspection\n" in failed
    leaving = show("math", "--last", "leaving").output
    assert re.search(r"claimed for step 1\n.* trained: step 1 was committed\n.* waits for the archiver", leaving)
    assert "admitted as group 4; this is a copy" in show("math", "--last", "cooling").output


def test_a_running_group_shows_its_lease_and_what_was_salvaged(world: World, show: Show) -> None:
    world.start(math={"partial_rollout": True})
    world.admit(1)
    (lease,) = world.lease(1, worker="w")
    world.buffer.salvage([SamplePart(lease, 0, 1, 0, make_sample(0, status="a", text="so far", tokens=3))])
    shown = show("math", 1).output
    assert re.search(r"is running: its lease ends in \d+ s unless the worker renews it; 1 parts of samples", shown)
    assert "sample 0: pending\n" in shown
    assert "sample 1: aborted, ended by abort\n  3 tokens: 3 of version 0" in shown
    assert "| so far" in shown


def test_an_agents_conversation_is_shown_turn_by_turn(world: World, show: Show) -> None:
    world.start()
    segment = make_sample(0).segments[0]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": [{"type": "text", "text": "3"}, {"type": "image"}]},
        {"role": "assistant", "content": "3", "reasoning_content": "easy"},
    ]
    sample = Sample((segment, segment), SampleStatus.COMPLETED, reward=1.0, text="3", extra={"messages": messages})
    put(world, sample, sample)
    shown = show("math", 1).output
    assert "  6 tokens in 2 segments: 6 of version 0; the loss counts 6\n" in shown
    assert (
        '  assistant:\n  | let me see\n  | -> add({"a":1})\n  tool add:\n  | 3\n  | [image]\n'
        "  assistant:\n  | (thinks) easy\n  | 3\n"
    ) in shown


def test_the_calls_of_an_agent_are_a_tree_with_the_segments_that_train_them(world: World, show: Show) -> None:
    world.start()
    segment = make_sample(0).segments[0]
    facts = [
        (0, None, 0, None),
        (1, 0, 0, None),
        (2, 0, 1, None),
        (3, 1, None, "superseded"),
        (4, 2, 1, None),
        (5, None, 2, None),
    ]
    calls = [
        {"number": number, "parent": parent, "segment": place, "tokens": number + 3, "left_out": why}
        for number, parent, place, why in facts
    ]
    sample = Sample((segment,) * 3, SampleStatus.COMPLETED, reward=1.0, text="3", extra={"calls": calls})
    put(world, sample, sample)
    shown = show("math", 1).output
    assert (
        "  call 0: 3 tokens, segment 0\n"
        "  call 1 after 0: 4 tokens, segment 0\n"
        "  call 3 after 1: 6 tokens, not trained, superseded\n"
        "    call 2 after 0: 5 tokens, segment 1\n"
        "    call 4 after 2: 7 tokens, segment 1\n"
        "  call 5: 8 tokens, segment 2\n"
    ) in shown


def test_images_of_a_prompt_are_counted(world: World, show: Show) -> None:
    world.start()
    image = ImageRef("https://example.org/cat.png", "0" * 64)
    content = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},)
    prompt = Prompt(content, images=(image,))
    assert world.buffer.admit("math", [(prompt, 1)], epoch=1, cursor=0, target=10, step=1).count == 1
    lines = lines_of(show("math", 1))
    at = lines.index("prompt")
    assert lines[at + 1 : at + 4] == ["| [image]", "| what is it?", "with 1 image"]


def test_tools_are_named_once_where_samples_had_those_of_the_prompt(world: World, show: Show) -> None:
    world.start()
    offered = tuple({"type": "function", "function": {"name": name}} for name in ("add", "sub\x1b"))
    prompt = Prompt("1 + 2?", tools=offered)
    world.buffer.admit("math", [(prompt, 1)], epoch=1, cursor=0, target=10, step=1)
    (lease,) = world.lease(1)
    samples = (replace(make_sample(0), tools=offered), replace(make_sample(0), tools=offered[:1]))
    world.buffer.put([GroupResult(lease, samples)])
    lines = lines_of(show("math", 1))
    assert [line for line in lines if "tools" in line] == ["with tools: add, sub\\x1b", "with tools: add"]
    assert lines.index("with tools: add") > lines.index("prompt") + 2
    found = orjson.loads(show("math", 1, "--json").output)
    assert found["tools"] == {"names": ["add", "sub\x1b"], "definitions": list(offered)}
    assert [sample["tools"]["names"] for sample in found["samples"]] == [[], ["add"]]


def test_a_group_of_an_evaluation_says_so(world: World, show: Show) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    evaluation = world.buffer.open_batch("held_out", "eval/0", "eval", step=1)
    world.buffer.fill_batch("held_out", evaluation.handle, 0, [Prompt("one")], last=True)
    world.put(world.lease(1, "held_out"))
    shown = show("held_out", "--last", "gathered").output
    assert "admitted for the evaluation of step 1\n" in shown
    assert "waits for the rest of its batch or evaluation" in shown


def test_what_a_model_wrote_cannot_control_the_terminal(world: World, show: Show) -> None:
    hostile = "\x1b]0;owned\x07\x9b2J\r\u202eevil\u2028\ud7ff\x00\x7f"
    world.start()
    segments = make_sample(0).segments
    messages = [{"role": "assistant\x1b", "content": hostile, "name": hostile}]
    bad = Sample(
        segments,
        SampleStatus.FAILED,
        failure=FailureKind.TOOL,
        text=hostile,
        error=hostile,
        reward_parts={hostile: 1.0},
    )
    extra = {"messages": messages, "worker": hostile, "judge": hostile}
    spoken = Sample(segments, SampleStatus.FAILED, failure=FailureKind.TOOL, extra=extra, error="x")
    prompt = Prompt(hostile, answer=hostile)
    world.buffer.admit("math", [(prompt, 1)], epoch=1, cursor=0, target=10, step=1)
    (lease,) = world.lease(1, worker=hostile)
    world.buffer.put([GroupResult(lease, (bad, spoken), error=hostile)])
    for words in (["1"], ["1", "--full"], ["1", "--json"], ["--last", "failed"]):
        shown = show("math", *words)
        assert shown.exit_code == 0, shown.output
        assert all(character.isprintable() or character == "\n" for character in shown.output), words
    assert r"\x1b]0;owned\x07\x9b2J\r\u202eevil" in show("math", 1).output


def test_long_and_wide_texts_are_broken_and_cut_with_a_note(world: World, show: Show) -> None:
    world.start()
    text = "数" * 3000
    put(world, make_sample(0, text=text), make_sample(0, text="short"))
    shown = show("math", 1).output
    assert all(len(line) + line.count("数") <= 100 for line in shown.splitlines())
    assert "  ... and 51 more lines\n" in shown
    assert shown.endswith("texts are cut: --full shows all of them\n")
    whole = show("math", 1, "--full").output
    assert whole.count("数") == 3000
    assert "--full" not in whole


def test_the_groups_of_a_step_have_a_row_each(world: World, show: Show) -> None:
    world.start().complete(3)
    world.claim(1)
    lines = show("math", "--step", 1).output.splitlines()
    assert [line.split() for line in lines] == [
        ["group", "task", "status", "reward", "tokens", "tries", "worker", "prompt"],
        ["1", "math", "claimed", "1.000", "6", "1", "worker", "math", "0"],
        ["2", "math", "claimed", "1.000", "6", "1", "worker", "math", "1"],
    ]
    assert show("math", "--step", 1, "--full").output.count("claimed for step 1") == 2
    assert show("math", "--step", 1, "--json").output.count("\n") == 2


def test_a_group_of_shards_is_asked_for_by_its_shard(world: World, show: Show) -> None:
    rules: dict[str, dict[str, object]] = {f"math.{shard}of2": {"batch_groups": 1} for shard in (1, 2)}
    world.start(0, mode="replay", launch_id="launch-1", **rules)
    world.complete(1, "math.1of2")
    world.complete(1, "math.2of2")
    asked = show("math", 1)
    assert asked.output == "error: each shard has a group 1: give the shard as TASK: math.1of2, math.2of2\n"
    assert show("math.2of2", 1).output.startswith("group 1 of math.2of2: completed")
    assert show("math", "--last", "completed").output.startswith("group 1 of math.2of2: completed")
    world.claim(1, **{"math.1of2": 1, "math.2of2": 1})
    assert show("math", "--step", 1).output.count("claimed") == 2


def test_a_group_that_is_not_there_is_one_line_with_the_reason(world: World, show: Show) -> None:
    world.start().complete(2)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    gone = show("math", 1)
    assert gone.exit_code == 1
    assert "error: group 1 of math has left the buffer" in gone.output
    assert "2 trained" in gone.output
    assert "`rollq archive` keeps such groups" in gone.output
    assert gone.output.count("\n") == 1
    assert "was never admitted: the task has had groups 1 to 2" in show("math", 3).output
    assert "step 7 has not been claimed yet: the last claimed step is 1" in show("math", "--step", 7).output
    assert "no group of math is failed now" in show("math", "--last", "failed").output


def test_the_batch_of_a_covered_step_has_left(world: World, show: Show) -> None:
    world.start().complete(4)
    world.train(1)
    world.train(2)
    world.buffer.checkpoint(world.held, 2)
    assert "the batch of step 1 has left the buffer" in show("math", "--step", 1).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope", "1"], "error: TASK 'nope': the run has math\n"),
        (["math"], "error: say which groups to show: give one of GROUP, --step and --last\n"),
        (["math", "1", "--step", "1"], "error: say which groups to show: give one of GROUP, --step and --last\n"),
        (["math", "x"], "error: GROUP 'x': must be a number of at most 15 digits\n"),
    ],
)
def test_words_that_make_no_sense_are_one_line(world: World, show: Show, words: list[str], message: str) -> None:
    world.start()
    shown = show(*words)
    assert (shown.exit_code, shown.output) == (2, message)


def test_numbers_are_shown_where_the_folder_of_payloads_is_not(
    server_url: str,
    run_name: str,
    show: Show,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = PayloadSettings(url=str(tmp_path), min_bytes=1000)
    with Buffer.connect(server_url, run_name, payloads=away) as buffer:
        world = World(buffer).start()
        world.admit(1)
        world.put(world.lease(1), text="far away " * 1000)
    monkeypatch.setenv("ROLLQ_PAYLOADS_URL", str(tmp_path))
    assert "| far away far away" in show("math", 1).output
    monkeypatch.delenv("ROLLQ_PAYLOADS_URL")
    lines = lines_of(show("math", 1))
    assert lines[0] == "group 1 of math: completed, reward 1.000"
    (problem,) = [line for line in lines if line.startswith("samples are not shown: ")]
    assert "set payloads.url" in problem
    monkeypatch.setenv("ROLLQ_PAYLOADS_URL", "/not/on/this/machine")
    shown = show("math", 1)
    assert shown.exit_code == 0
    assert "samples outside the server are not shown: " in caplog.text
    assert "group 1 of math: completed" in shown.output


def test_a_frame_that_is_damaged_or_gone_is_a_problem_of_its_group(world: World, show: Show) -> None:
    world.start().complete(2)
    keys, client = task_keys(world.buffer.run, "math"), world.buffer.client
    client.hset(keys.rollout(1), "all", b"not a frame")
    client.unlink(keys.payload(2, world.buffer.inspect("math", 2)["payload"]))
    assert "samples are not shown: frame of 11 bytes" in show("math", 1).output
    assert "samples are not shown: its samples are no longer in the store" in show("math", 2).output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\nüñ 数", "plain\nüñ 数"),
        ("a\tb", "a    b"),
        ("\x1b[0m", r"\x1b[0m"),
        ("\u200b\u2028\x85", r"\u200b\u2028\x85"),
    ],
)
def test_only_characters_that_could_act_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_groups_that_have_left_are_shown_from_the_archive(world: World, server_url: str, tmp_path: Path) -> None:
    world.start(math={"archive": True})
    world.complete(3)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    (tmp_path / "archive").mkdir()
    (tmp_path / "rollq.toml").write_text(
        f'run = "{world.buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n[archive]\nurl = "{tmp_path / "archive"}"\n'
        '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    )

    def shown(*words: str) -> Result:
        return CliRunner().invoke(main, ["groups", "show", str(tmp_path / "rollq.toml"), "math", *words])

    assert "waits for the archiver" in shown("1").output
    done = CliRunner().invoke(main, ["archive", str(tmp_path / "rollq.toml"), "--finish"])
    assert done.exit_code == 0, done.output
    assert not world.buffer.look("math", [1])
    group, step = shown("1"), shown("--step", "1")
    assert group.exit_code == step.exit_code == 0, group.output + step.output
    assert "trained: step 1 was committed" in group.output
    assert [line.split()[:2] for line in step.output.splitlines()[1:3]] == [["1", "math"], ["2", "math"]]
    elsewhere = CliRunner().invoke(
        main, ["groups", "show", "math", "1", "--url", server_url, "--run", world.buffer.run]
    )
    assert "with url in [archive], `rollq archive` keeps such groups" in elsewhere.output


def test_an_archived_group_shows_the_leases_that_it_showed_in_the_buffer(
    world: World, server_url: str, tmp_path: Path
) -> None:
    world.start(math={"archive": True, "partial_rollout": True})
    world.admit(1)
    world.buffer.hand_back(world.lease(1, worker="a"), counted=True, error="no memory")
    (lease,) = world.lease(1, worker="killed")
    world.buffer.salvage([SamplePart(lease, 0, 0, 0, make_sample(0, status="a"))])
    world.run_out([lease])
    world.buffer.reap("math")
    world.put(world.lease(1, worker="c d"))
    world.complete(1)
    world.train(1)
    folder, settings = tmp_path / "archive", tmp_path / "rollq.toml"
    folder.mkdir()
    settings.write_text(
        f'run = "{world.buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n[archive]\nurl = "{folder}"\n'
        '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    )

    def life() -> list[str]:
        shown = CliRunner().invoke(main, ["groups", "show", str(settings), "math", "1"])
        assert shown.exit_code == 0, shown.output
        return lines_of(shown)[3 : lines_of(shown).index("prompt") - 1]

    def rows() -> str:
        return CliRunner().invoke(main, ["groups", "show", str(settings), "math", "--step", "1"]).output

    live, live_rows = life(), rows()
    world.buffer.checkpoint(world.held, 1)
    done = CliRunner().invoke(main, ["archive", str(settings), "--finish"])
    assert done.exit_code == 0, done.output
    assert not world.buffer.look("math", [1])
    assert life() == [*live, "now  is in the archive"]
    assert rows() == live_rows
    assert [line.removeprefix("<time>  ").split(", after")[0] for line in live[1:7]] == [
        "leased to a with version 0 (attempt 1)",
        "handed back by the worker after an error",
        "leased to killed with version 0 (attempt 2)",
        "the lease ran out: the worker died, or was cut off from the server",
        "leased to c d with version 0 (attempt 3)",
        "put",
    ]
    assert "; 1 part" in live[4], "the line is cut at the width"


@pytest.mark.parametrize("number", ["9" * 16, "9" * 4301, "٣" * 16])
def test_a_number_that_no_group_has_is_refused(number: str) -> None:
    given = CliRunner().invoke(
        main, ["groups", "show", "math", number, "--url", "redis://127.0.0.1:1/0", "--run", "sums"]
    )
    assert given.exit_code == 2
    assert "at most 15 digits" in given.output
    assert "Traceback" not in given.output

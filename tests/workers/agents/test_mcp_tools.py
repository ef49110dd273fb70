"""Tools of MCP servers in the loop `tools`: real servers, as processes, over their standard streams and over HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, SampleStatus, Status
from rollq.workers.agents.loops import is_resumable, sessions
from rollq.workers.agents.mcp.server import McpServer, McpSession
from rollq.workers.agents.mcp.tool_lists import ToolList, ToolSchema
from rollq.workers.agents.multi_turn import MultiTurn
from rollq.workers.agents.tool_calls import CallError
from rollq.workers.agents.tools import ToolError, ToolLost, ToolSettings
from rollq.workers.groups.agent_loops import close_loop, make_loop
from rollq.workers.run import Worker
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.mcp_servers import command, left, listening, plain_command
from support.waiting import PATIENCE_S, wait_until
from support.worker_run import Script, WorkerWorld

PROMPT = Prompt("6*7?")
SUM = call("calculator", expression="6*7")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left() == []


@pytest.fixture
def tokenizer(tmp_path: Path) -> HfTokenizer:
    return chat_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that several tests share, each in sessions of its own."""
    with listening() as url:
        yield url


@pytest.fixture(params=["command", "url"])
def target(request: pytest.FixtureRequest) -> str:
    """A server, as the settings name it."""
    commands = {"command": command, "plain": plain_command}
    return commands[request.param]() if request.param in commands else request.getfixturevalue("url")


def play(scene: Callable[[McpServer], Awaitable[None]], mcp: str, **settings: Any) -> None:
    """Play a scene with a server, and look that it leaves nothing: no task, process or connection."""

    async def run() -> None:
        server = McpServer("desk", ToolSettings(mcp=mcp, **settings))
        assert left() == []
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(server)
        finally:
            await server.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert left() == []

    asyncio.run(run())


async def ask(session: McpSession, name: str, /, **arguments: Any) -> str:
    return await session.tools[name].call(arguments, PROMPT)


@pytest.mark.long
def test_the_model_calls_a_tool_of_a_server_and_its_words_alone_are_trained(
    target: str, tokenizer: HfTokenizer
) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])

    async def run() -> Any:
        loop = make_loop("tools", {"tools": {"desk": {"mcp": target, "only": ["calculator"]}}})
        try:
            return await loop.run(rollout(model, PROMPT))
        finally:
            await close_loop(loop)

    sample = asyncio.run(run())
    assert (sample.status, sample.text) == (SampleStatus.COMPLETED, "It is 42")
    [segment] = sample.segments
    assert tokenizer.decode(segment.response_ids.tolist(), special=True) == (
        f"{SUM}<eos>\ntool: 42<eos>\nassistant: It is 42<eos>"
    )
    said = segment.response_ids[segment.loss_mask].tolist()
    assert tokenizer.decode(said, special=True) == f"{SUM}<eos>It is 42<eos>"
    assert (segment.logprobs[~segment.loss_mask] == 0).all()
    [tool] = sample.tools
    assert tool["function"]["parameters"] == {  # as the server describes it
        "properties": {"expression": {"title": "Expression", "type": "string"}},
        "required": ["expression"],
        "title": "calculatorArguments",
        "type": "object",
    }
    assert tool["function"]["description"] == "Work out an arithmetic expression."


@pytest.mark.parametrize("target", ["command", "plain", "url"], indirect=True)
def test_mistakes_of_the_model_are_answered_with_a_message(target: str) -> None:
    async def scene(server: McpServer) -> None:
        session = await server.open()
        for name, arguments, problem in (
            ("calculator", {"sum": "6*7"}, "wrong arguments for 'calculator': 'expression' is a required property"),
            ("count", {"by": "x"}, "wrong arguments for 'count': by: 'x' is not of type 'integer'"),
            ("calculator", {"expression": "six"}, "Error executing tool calculator"),
        ):
            with pytest.raises(CallError, match=problem):
                await ask(session, name, **arguments)
        with pytest.raises(CallError, match="Unknown tool"):
            await session.connection.call("weather", {})
        assert await ask(session, "picture") == "a cat\n[image (image/png), which cannot be shown]"
        await session.close()

    play(scene, target)


def test_a_loop_answers_for_a_tool_that_the_server_does_not_have(tokenizer: HfTokenizer) -> None:
    async def run() -> Any:
        loop = make_loop("tools", {"tools": {"desk": {"mcp": plain_command()}, "lookup": {}}})
        try:
            model = Model(tokenizer, [call("weather") + call("lookup", key="x") + call("count") * 2, "sorry"])
            return await loop.run(rollout(model, PROMPT))
        finally:
            await close_loop(loop)

    answers = [each["content"] for each in asyncio.run(run()).extra["messages"] if each["role"] == "tool"]
    assert answers[0].startswith("error: there is no tool 'weather'; use one of calculator, count")
    assert answers[1] == "error: the table has no entry 'x'"
    assert sorted(answers[2:]) == ["1", "2"]


@pytest.mark.long
@pytest.mark.parametrize("samples", [120, pytest.param(600, marks=pytest.mark.slow)])
def test_all_samples_at_once_have_a_session_each_over_http_and_no_call_is_made_twice(samples: int) -> None:
    """A process has files for 1,024 connections; these few samples may take no more than a share of theirs."""

    async def scene(server: McpServer) -> None:
        before = len(os.listdir("/proc/self/fd"))
        sessions = await asyncio.gather(*(server.open() for _ in range(samples)))
        for number in (1, 2):
            counts = await asyncio.gather(*(ask(session, "count") for session in sessions))
            assert counts == [str(number)] * samples
        assert len(os.listdir("/proc/self/fd")) - before < samples // 2
        await asyncio.gather(*(session.close() for session in sessions))

    with listening() as url:
        play(scene, url, start_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S)


@pytest.mark.long
@pytest.mark.parametrize("stateful", [False, True])
def test_samples_share_the_process_of_a_command_unless_it_has_state(stateful: bool) -> None:
    async def scene(server: McpServer) -> None:
        one, other = await server.open(), await server.open()
        assert (await ask(one, "process") == await ask(other, "process")) == (not stateful)
        assert [await ask(one, "count"), await ask(other, "count")] == ["1", "1" if stateful else "2"]
        await one.close()
        assert await ask(other, "count") == ("2" if stateful else "3")
        await other.close()

    play(scene, command(), stateful=stateful)


def test_samples_share_a_session_over_http_if_they_are_told_to(url: str) -> None:
    async def scene(server: McpServer) -> None:
        one, other = await server.open(), await server.open()
        assert [await ask(one, "count"), await ask(other, "count")] == ["1", "2"]

    play(scene, url, stateful=False)


def test_a_server_that_dies_costs_the_samples_that_had_sessions_and_is_started_again() -> None:
    async def scene(server: McpServer) -> None:
        one, other = await server.open(), await server.open()
        with pytest.raises(ToolLost, match="tool 'die': the session with MCP server 'desk' is lost") as lost:
            await ask(one, "die")
        assert lost.value.kind is FailureKind.TOOL
        with pytest.raises(ToolLost):
            await ask(other, "count")
        again = await server.open()
        assert await ask(again, "count") == "1"
        psutil.Process(int(await ask(again, "process"))).kill()  # between calls, so that nothing notices
        after = await server.open()
        assert await ask(after, "count") == "1"
        with pytest.raises(ToolLost):
            await ask(again, "count")

    play(scene, plain_command())


def test_the_loss_of_a_server_is_never_told_to_the_model(tokenizer: HfTokenizer) -> None:
    async def run() -> None:
        loop = make_loop("tools", {"tools": {"desk": {"mcp": plain_command()}}, "tell_errors": True})
        try:
            with pytest.raises(SampleFailed, match="is lost"):
                await loop.run(rollout(Model(tokenizer, [call("die") + call("count"), "done"]), PROMPT))
            sample = await loop.run(rollout(Model(tokenizer, [call("count"), "done"]), PROMPT))
            assert sample.extra["messages"][1]["content"] == "1"
        finally:
            await close_loop(loop)

    asyncio.run(run())


def test_a_server_over_http_that_comes_back_does_not_know_the_sessions_from_before() -> None:
    port = free_port("127.0.0.1")

    async def scene(server: McpServer) -> None:
        killed, stays = await server.open(), await server.open()
        with pytest.raises(ToolLost):
            await ask(killed, "die")
        waiting = asyncio.create_task(server.open())  # until the server is back
        with listening(port):
            after = await waiting
            assert await ask(after, "count") == "1"
            with pytest.raises(ToolLost, match="Session"):
                await ask(stays, "count")
            await asyncio.gather(*(each.close() for each in (killed, stays, after)))

    with listening(port) as url:
        play(scene, url, start_timeout_s=PATIENCE_S)


@pytest.mark.long
def test_a_call_out_of_time_costs_its_sample_and_a_server_that_hangs_is_replaced() -> None:
    async def scene(server: McpServer) -> None:
        one = await server.open()
        pid = await ask(one, "process")
        with pytest.raises(ToolError, match=r"tool 'wait': took longer than 10 s"):
            await ask(one, "wait")
        assert await ask(await server.open(), "process") == pid  # it answers others
        with pytest.raises(ToolError, match=r"tool 'hang': took longer than 10 s"):
            await ask(one, "hang")
        with pytest.raises(ToolLost):
            await ask(one, "count")
        assert await ask(await server.open(), "process") != pid

    play(scene, command(), timeout_s=10)


@pytest.mark.long
def test_a_server_over_http_that_hangs_costs_the_samples_that_call_it_and_those_that_begin() -> None:
    async def scene(server: McpServer) -> None:
        one, other = await server.open(), await server.open()
        process = psutil.Process(int(await ask(one, "process")))
        process.suspend()
        with pytest.raises(ToolError, match=r"tool 'count': took longer than 10 s"):
            await ask(one, "count")
        with pytest.raises(SampleFailed, match=r"it did not answer within 20 s"):
            await server.open()
        process.resume()
        assert await ask(other, "count") == "1"
        await asyncio.gather(one.close(), other.close())

    with listening() as url:
        play(scene, url, timeout_s=10, start_timeout_s=20)


def test_a_server_with_other_tools_than_at_the_start_is_refused(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("calculator count die")

    async def scene(server: McpServer) -> None:
        session = await server.open()
        names.write_text("calculator process die")
        with pytest.raises(ToolLost):
            await ask(session, "die")
        with pytest.raises(SampleFailed, match=r"have changed since .* \(gone: count; new: process\)"):
            await server.open()
        names.write_text("die count calculator")  # the order does not matter
        assert await ask(await server.open(), "count") == "1"

    play(scene, plain_command(names))


def test_a_command_gets_a_clean_environment_and_a_url_headers_by_name(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLQ_GATEWAY_KEY", "hidden")
    monkeypatch.setenv("DESK_KEY", "shown")

    async def with_command(server: McpServer) -> None:
        seen = set((await ask(await server.open(), "variables")).split())
        assert {"PATH", "DESK"} <= seen
        assert not seen & {"ROLLQ_GATEWAY_KEY", "DESK_KEY", "PYTHONPATH"}

    async def with_url(server: McpServer) -> None:
        session = await server.open()
        assert await ask(session, "header", name="x-desk") == "shown"
        await session.close()

    play(with_command, plain_command(), env={"DESK": "1"})
    play(with_url, url, headers={"X-Desk": "DESK_KEY"})


HOLDER = """
import asyncio, sys
from rollq.workers.agents.mcp.server import McpServer
from rollq.workers.agents.tools import ToolSettings
from rollq.buffer.values.rollouts import Prompt
async def main():
    session = await McpServer("desk", ToolSettings(mcp=sys.argv[1])).open()
    print(await session.tools["process"].call({}, Prompt("x")), flush=True)
    await session.tools["hang"].call({}, Prompt("x"))
asyncio.run(main())
"""


def test_a_server_dies_with_a_worker_that_is_killed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", HOLDER, plain_command()], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [({}, True), ({"stateful": True}, False), ({"stateful": False}, True)],
)
def test_an_interrupted_sample_continues_unless_a_server_has_its_state(
    settings: Mapping[str, Any], is_kept: bool
) -> None:
    loop = make_loop("tools", {"tools": {"desk": {"mcp": plain_command(), **settings}, "lookup": {}}})
    assert isinstance(loop, MultiTurn)
    assert is_resumable(loop) == is_kept


def test_a_worker_runs_no_more_processes_of_a_command_than_calls() -> None:
    def most(**settings: Any) -> int | None:
        return sessions(make_loop("tools", {"tools": {"desk": {"mcp": plain_command(), "concurrent": 3, **settings}}}))

    assert most(stateful=True) == 3
    assert most() is None


def test_a_session_over_http_has_state_unless_the_settings_say_otherwise() -> None:
    url = "http://127.0.0.1:1/mcp"
    assert not ToolSettings(mcp=url).is_shared
    assert ToolSettings(mcp=url, stateful=False).is_shared


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"desk": {"mcp": "http://127.0.0.1:1/mcp", "start_timeout_s": 0.5}}, "MCP server 'http://127.0.0.1:1/mcp': "),
        ({"desk": {"mcp": "no-such-program"}}, "it wrote: no-such-program: No such file"),
        ({"desk": {"mcp": f"{sys.executable} -c 'raise SystemExit(\"no desk\")'"}}, "it wrote: no desk"),
        ({"desk": {"mcp": ""}}, "mcp is empty"),
        ({"desk": {"mcp": "'x"}}, "No closing quotation"),
        ({"desk": {"mcp": "http:///mcp"}}, "a URL without a host"),
        ({"desk": {"mcp": "http://me:secret@desk/mcp"}}, "a URL with a password: give it as a header instead"),
        ({"desk": {"mcp": "x", "function": "a.b"}}, "mcp and function exclude each other"),
        ({"desk": {"mcp": "x", "headers": {"A": "B"}}}, "headers are for the URL"),
        ({"desk": {"mcp": "http://desk", "env": {"A": "B"}}}, "env is for the command"),
        ({"desk": {"mcp": "http://desk", "headers": {"A": "NO_SUCH"}}}, "the environment variable NO_SUCH is not set"),
        ({"calculator": {"stateful": True}}, "stateful is for an MCP server: set mcp as well"),
        ({"desk": {"mcp": plain_command(), "only": ["weather"]}}, "only: the server has no tool 'weather'; it has"),
        ({"desk": {"mcp": plain_command()}, "calculator": {}}, "tools.calculator: there are two tools 'calculator'"),
    ],
)
def test_what_cannot_be_offered_is_refused_at_the_start(tools: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("tools", {"tools": tools})
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [({"type": "objekt"}, "'objekt' is not valid"), ({"$ref": "https://example.com/x"}, "Unresolvable")],
)
def test_schemas_that_are_none_are_refused(schema: dict[str, Any], problem: str) -> None:
    tool = ToolSchema({"type": "function", "function": {"name": "x", "description": "", "parameters": schema}})
    with pytest.raises(ConfigError, match="tool 'x' has an invalid JSON schema") as refused:
        tool.check_schema()
    assert problem in str(refused.value)


def test_the_digest_of_tools_does_not_depend_on_order_but_on_every_word() -> None:
    def of(*tools: tuple[str, str]) -> ToolList:
        described = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
            for name, text in tools
        ]
        return ToolList({each["function"]["name"]: ToolSchema(each) for each in described})  # type: ignore[index]

    one = of(("a", "first"), ("b", "second"))
    assert one.changes(of(("b", "second"), ("a", "first"))) == ""
    assert one.changes(of(("a", "other"), ("c", "third"))) == "gone: b; new: c; changed: a"


def liked(prompt: Prompt, sample: Any) -> float:
    """A judge that likes everything."""
    return 1.0


def test_a_worker_samples_groups_with_a_server_and_leaves_nothing(buffer: Buffer, server_url: str) -> None:
    options = {"tools": {"desk": {"mcp": plain_command()}}, "max_turns": 2}
    rules = {"judge": f"{__name__}.liked", "agent_loop": "tools", "agent_options": options}
    world = WorkerWorld(buffer, server_url, rules)
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 2)

    world.play(scene, answer=SUM)
    samples = [sample for _, group in world.results(2) for sample in group]
    assert {message["content"] for sample in samples for message in sample.extra["messages"][1::2]} == {"42"}
    assert left() == []

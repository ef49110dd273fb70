"""`rollq doctor`: its exit status, its report as text and JSON, and what it takes from the settings."""

import math
import re
from pathlib import Path

import orjson
import pytest
import redis
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.connection import open_client
from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.library import digest, library_name
from rollq.buffer.store.users import Role, acl_lines, password_digest
from rollq.buffer.wire import compiled
from rollq.cli.commands.doctor import planned_tasks, weights_of
from rollq.cli.main import main
from rollq.cli.settings.file import load_settings
from rollq.monitor.doctor import checks
from rollq.monitor.doctor.findings import WIDTH
from rollq.monitor.doctor.sizing import ROW_BYTES, live_groups
from support.buffer_run import World

TRAINER = '[trainer]\nmodel = "model"\noutput = "out"\nsteps = 9\ncheckpoint_every = 5\n'


def doctor(*args: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, args)], env=environment)


def write_settings(folder: Path, url: str, *, redis_more: str = "", task: str = "", trainer: str = "") -> Path:
    path = folder / "rollq.toml"
    path.write_text(
        f'run = "r"\n[redis]\nbuffer_url = "{url}"\n{redis_more}\n'
        f'[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 4\n{task}\n{trainer}'
    )
    return path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, no server is slow."""
    monkeypatch.setattr(checks, "LONGEST_MEDIAN_S", math.inf)
    monkeypatch.setattr(checks, "LONGEST_PING_S", math.inf)


@pytest.fixture
def healthy_server(fresh_server: EmbeddedServer) -> EmbeddedServer:
    """A server with a limit that is large enough."""
    with redis.Redis.from_url(fresh_server.url) as client:
        client.config_set("maxmemory", "1gb")
    return fresh_server


def create_run(server: EmbeddedServer) -> None:
    with Buffer.connect(server.url, "r") as buffer:
        buffer.create_run()


def test_the_exit_status_is_that_of_the_worst_finding(healthy_server: EmbeddedServer, tmp_path: Path) -> None:
    place = ("--url", healthy_server.url, "--run", "r")
    create_run(healthy_server)
    assert doctor(*place).exit_code == 0
    with redis.Redis.from_url(healthy_server.url) as client:
        client.config_set("maxmemory", 0)
        assert doctor(*place).exit_code == 3
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert doctor(*place).exit_code == 1
    healthy_server.stop()
    result = doctor(*place)
    assert (result.exit_code, "start it, or correct the URL" in " ".join(result.stdout.split())) == (1, True)
    assert doctor("--url", healthy_server.url).exit_code == 2
    assert doctor(tmp_path / "missing.toml").exit_code == 2


def test_a_run_that_does_not_exist_is_a_problem_if_it_was_named(healthy_server: EmbeddedServer, tmp_path: Path) -> None:
    named = doctor("--url", healthy_server.url, "--run", "nope")
    assert (named.exit_code, "run 'nope' does not exist here" in named.stdout) == (3, True)
    config = write_settings(tmp_path, healthy_server.url)
    planned = doctor(config)
    assert (planned.exit_code, "run 'r' does not exist yet" in planned.stdout) == (0, True)
    create_run(healthy_server)
    assert "does not exist" not in doctor("--url", healthy_server.url, "--run", "r").stdout
    assert "does not exist" not in doctor(config).stdout


def test_lines_are_short_and_commands_whole(fresh_server: EmbeddedServer) -> None:
    create_run(fresh_server)
    lines = doctor("--url", fresh_server.url, "--run", "r").stdout.splitlines()
    assert lines[0] == fresh_server.url
    assert lines[-1].startswith("1 warning, ")
    assert all(len(line) <= WIDTH for line in lines if "$ " not in line and "/" not in line)
    (command,) = [line.partition("$ ")[2] for line in lines if "$ " in line]
    assert command.startswith(f"redis-cli -h 127.0.0.1 -p {fresh_server.port} config set maxmemory ")


def test_json_has_every_finding(healthy_server: EmbeddedServer) -> None:
    create_run(healthy_server)
    report = orjson.loads(doctor("--url", healthy_server.url, "--run", "r", "--json").stdout)
    assert (report["schema"], report["level"]) == (1, "note")
    assert {tuple(finding) for finding in report["findings"]} == {("subject", "check", "level", "message", "commands")}
    assert report["findings"][0]["subject"] == healthy_server.url


def test_the_doctor_changes_nothing(healthy_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(healthy_server.url) as client:
        doctor("--url", healthy_server.url, "--run", "r")
        assert (client.dbsize(), client.function_list()) == (0, [])


def test_functions_that_no_role_uses_are_deleted(healthy_server: EmbeddedServer) -> None:
    place = ("--url", healthy_server.url, "--run", "r")
    with redis.Redis.from_url(healthy_server.url) as client:
        for name in ("rollq_aaaaaaaaaaaa", "rollq_bbbbbbbbbbbb", "rollq_5", "mine"):
            client.function_load(f"#!lua name={name}\nredis.register_function('{name}_f', function() end)")
        other = open_client(healthy_server.url, name="rollq-bbbbbbbbbbbb")
        with Buffer.connect(healthy_server.url, "r"), other:
            other.ping()
            words = " ".join(doctor(*place).stdout.split())
            assert "bbbbbbbbbbbb (1)" in words, "before or after those of this rollq: they are sorted"
            assert "; no role uses aaaaaaaaaaaa; rollq_5: from" in words
            result = doctor(*place, "--clean")
            assert (result.exit_code, result.stdout) == (0, "deleted the functions rollq_aaaaaaaaaaaa\n")
            assert doctor(*place, "--clean").stdout == "found no unused functions\n"
        assert doctor(*place, "--clean").stdout == "deleted the functions rollq_bbbbbbbbbbbb\n"
        left = str(client.function_list())
    assert [name in left for name in (library_name(), "rollq_5", "mine", "rollq_bbbbbbbbbbbb")] == [True] * 3 + [False]


def test_only_the_operator_deletes_functions(tmp_path: Path) -> None:
    acl = tmp_path / "rollq.acl"
    lines = acl_lines("r", {role: password_digest(role.value) for role in (Role.MONITOR, Role.OPERATOR)})
    acl.write_text("\n".join(lines) + "\n")
    with EmbeddedServer(tmp_path / "server", acl=acl) as server:

        def clean(role: Role) -> Result:
            login = {"ROLLQ_REDIS_USER": f"r-{role.value}", "ROLLQ_REDIS_PASSWORD": role.value}
            return doctor("--url", server.url, "--run", "r", "--clean", **login)

        assert (clean(Role.OPERATOR).exit_code, clean(Role.OPERATOR).stdout) == (0, "found no unused functions\n")
        refused = clean(Role.MONITOR)
        assert refused.exit_code != 0
        assert "run `rollq doctor --clean` as the operator" in refused.stderr


def test_a_clean_makes_no_report(healthy_server: EmbeddedServer) -> None:
    result = doctor("--url", healthy_server.url, "--run", "r", "--clean", "--json")
    assert (result.exit_code, "without --json" in result.stderr) == (2, True)


def test_the_settings_add_the_queue_the_sizing_and_the_weights(
    healthy_server: EmbeddedServer, server_url: str, tmp_path: Path
) -> None:
    config = write_settings(tmp_path, server_url, redis_more=f'queue_url = "{healthy_server.url}"', trainer=TRAINER)
    report = orjson.loads(doctor(config, "--json").stdout)
    subjects = {finding["subject"] for finding in report["findings"]}
    assert subjects == {server_url, f"{healthy_server.url}, the queue", "this machine"}
    found = {finding["check"]: finding["message"] for finding in report["findings"]}
    assert "32 groups of " in found["sizing"]
    assert "the model is not on this machine" in found["weights"]


def test_the_payload_of_a_living_run_is_measured(healthy_server: EmbeddedServer, tmp_path: Path) -> None:
    config = write_settings(tmp_path, healthy_server.url)
    assert "if all samples reach their limits" in " ".join(doctor(config).stdout.split())
    with Buffer.connect(healthy_server.url, "r") as buffer:
        World(buffer).start(math={"batch_groups": 4}).complete(2)
    assert "as measured" in " ".join(doctor(config).stdout.split())


def test_the_folder_for_payloads_is_checked(healthy_server: EmbeddedServer, tmp_path: Path) -> None:
    place = ("--url", healthy_server.url, "--run", "r", "--json")
    config = write_settings(tmp_path, healthy_server.url, task=f'[payloads]\nurl = "{tmp_path}"\nmin_bytes = 1')
    for result in (doctor(config, "--json"), doctor(*place, ROLLQ_PAYLOADS_URL=str(tmp_path))):
        (found,) = [one for one in orjson.loads(result.stdout)["findings"] if one["check"] == "payloads"]
        assert (found["subject"], found["level"]) == ("this machine", "ok")
    ill = doctor(*place, ROLLQ_PAYLOADS_URL=str(tmp_path / "missing"))
    assert (ill.exit_code, "there is no such folder on this machine" in ill.stdout) == (1, True)


def test_a_codec_that_was_not_compiled_is_noted(
    healthy_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("--url", healthy_server.url, "--run", "r")
    create_run(healthy_server)
    assert "fast path" not in doctor(*place).stdout
    monkeypatch.setattr(compiled, "passes", None)
    noted = doctor(*place)
    assert (noted.exit_code, "install gcc and Python's headers" in " ".join(noted.stdout.split())) == (0, True)


def test_passwords_are_used_and_not_shown(healthy_server: EmbeddedServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(healthy_server.url) as client:
        client.config_set("requirepass", "planted-secret")
    config = write_settings(tmp_path, healthy_server.url)
    refused = doctor(config)
    assert (refused.exit_code, "ROLLQ_REDIS_PASSWORD" in refused.stdout) == (1, True)
    well = doctor(config, ROLLQ_REDIS_PASSWORD="planted-secret")
    assert (well.exit_code, "asks for a password" in well.stdout) == (0, True)
    assert "planted-secret" not in well.output


def test_the_settings_bound_what_a_task_takes(tmp_path: Path) -> None:
    task = 'filters = ["zero_advantage"]\nlimits.audit_groups = 7\n[producer]\nover_sample = 0.3'
    settings = load_settings(write_settings(tmp_path, "redis://h", task=task, trainer=TRAINER), {})
    assert live_groups(planned_tasks(settings)["math"]) == (2 + 1 + 5) * 4 + 2 + 7
    without = load_settings(write_settings(tmp_path, "redis://h"), {})
    assert live_groups(planned_tasks(without)["math"]) == (2 + 1 + 100) * 4


def test_the_settings_say_where_payloads_are(tmp_path: Path) -> None:
    def planned(url: str, more: str = "") -> tuple[int, bool, bool]:
        size = planned_tasks(load_settings(write_settings(tmp_path, url, task=more), {}))["math"]
        return size.payload_bytes - size.away_bytes, size.spread_bytes > 0, size.outside_bytes > 0

    one, several = "redis://h", 'redis://h:1,h:2/0"\nqueue_url = "redis://q'
    payload_bytes, *away = planned(one)
    assert away == [False, False]
    kept_bytes = 4 * 4096 + 8 * ROW_BYTES
    assert planned(several) == (kept_bytes, True, False)
    at_limit = f'[payloads]\nurl = "/p"\nmin_bytes = {payload_bytes - kept_bytes}'
    assert planned(one, at_limit) == (kept_bytes, False, True)
    assert planned(several, at_limit) == (kept_bytes, False, True)
    assert planned(one, at_limit + "0") == (payload_bytes, False, False)
    assert planned(several, at_limit + "0") == (kept_bytes, True, False)


def test_the_weights_are_those_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))

    def weights(trainer: str) -> object:
        found = weights_of(load_settings(write_settings(tmp_path, "redis://h", trainer=trainer), {}))
        return found and (found.folder, found.needed_bytes)

    assert weights("") is None
    assert weights(TRAINER) == (None, 4000)
    assert weights(TRAINER + 'transport = "path"\nkeep_versions = 1') == (tmp_path / "out" / "weights", 2000)
    assert weights(TRAINER + 'transport = "nccl"\ndevice = "cuda"') is None


def test_every_primary_of_a_cluster_is_examined(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path / "cluster") as cluster:
        report = orjson.loads(doctor("--url", cluster.url, "--run", "r", "--json").stdout)
        nodes = {node.url for node in cluster.nodes[:3]}
        assert {finding["subject"] for finding in report["findings"]} == nodes
        found = {(one["subject"], one["check"]): (one["level"], one["message"]) for one in report["findings"]}
        for node in nodes:
            assert found[node, "server"][0] == "ok"
            assert found[node, "replicas"] == ("ok", "replicas: 1; a result counts when one of them has it")
        cluster.nodes[3].stop()
        assert "this primary has no replica" in " ".join(doctor("--url", cluster.url, "--run", "r").stdout.split())


def test_the_memory_of_every_primary_is_compared_with_its_share(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path / "cluster") as cluster:
        config = write_settings(
            tmp_path,
            cluster.url,
            redis_more='queue_url = "redis://127.0.0.1:1"',
            task="batches.shards = 4",
            trainer=TRAINER,
        )

        def sizing() -> dict[str, tuple[str, str]]:
            report = orjson.loads(doctor(config, "--json").stdout)
            found = [finding for finding in report["findings"] if finding["check"] == "sizing"]
            return {finding["subject"]: (finding["level"], finding["message"]) for finding in found}

        first, second, third = (node.url for node in cluster.nodes[:3])
        for url, limit in ((first, "1mb"), (second, "1gb")):
            with redis.Redis.from_url(url) as client:
                client.config_set("maxmemory", limit)
        found = sizing()
        assert [found[url][0] for url in (first, second, third)] == ["warning", "ok", "note"]
        here = [int(re.findall(r"this primary has (\d) of 4 tasks", message)[0]) for _, message in found.values()]
        assert (sum(here), max(here)) == (4, 2)
        assert all("32 groups of " in message for _, message in found.values())


def test_functions_are_loaded_without_a_run(fresh_server: EmbeddedServer) -> None:
    result = doctor("--load-functions", "--url", fresh_server.url, "--run", "r")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"the server has the functions {library_name()}, of the release with digest {digest()}\n"
    both = doctor("--load-functions", "--clean", "--url", fresh_server.url, "--run", "r")
    assert (both.exit_code, "give one of them" in both.output) == (2, True)

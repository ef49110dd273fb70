from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.run_location import RunLocation
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.model import RollqSettings

MINIMAL = """
run = "r"
[tasks.math]
prompts = "data/math.jsonl"
batch_groups = 4
{more}
[trainer]
model = "model"
output = "out"
steps = 10
{trainer}
"""


def load(tmp_path: Path, text: str = MINIMAL, more: str = "", trainer: str = "", **environment: str) -> RollqSettings:
    path = tmp_path / "rollq.toml"
    path.write_text(text.replace("{more}", more).replace("{trainer}", trainer))
    return load_settings(path, environment)


def problem(tmp_path: Path, text: str = MINIMAL, more: str = "", trainer: str = "", **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, more, trainer, **environment)
    return str(caught.value)


def test_a_short_file_gets_defaults(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert (settings.run, settings.seed, settings.producer.strategy) == ("r", 0, "async")
    assert settings.tasks["math"].group_size == 8


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    settings = load(tmp_path, trainer='[worker.options]\nmodel = "tiny"\n')
    assert settings.trainer is not None
    assert settings.tasks["math"].prompts == tmp_path / "data" / "math.jsonl"
    assert (settings.trainer.model, settings.trainer.output) == (tmp_path / "model", tmp_path / "out")
    assert settings.worker.options == {"model": tmp_path / "tiny"}


def test_the_model_of_an_engine_is_a_path_and_other_options_of_this_name_are_not(tmp_path: Path) -> None:
    more = 'agent_loop = "own.Loop"\nagent_options = { workspace = "w", options = { model = "judge-1" } }\n'
    engine = '[worker.options.engine_args.speculative_config]\nmodel = "draft"\n'
    settings = load(tmp_path, more=more, trainer=engine)
    assert settings.worker.options["engine_args"]["speculative_config"] == {"model": tmp_path / "draft"}
    assert settings.tasks["math"].agent_options == {"workspace": tmp_path / "w", "options": {"model": "judge-1"}}


def test_absolute_paths_and_home_stay_where_they_are(tmp_path: Path) -> None:
    text = 'run = "r"\n[tasks.a]\nprompts = "/data/a.jsonl"\nbatch_groups = 1\n'
    assert load(tmp_path, text).tasks["a"].prompts == Path("/data/a.jsonl")
    assert load(tmp_path, text.replace("/data", "~")).tasks["a"].prompts == Path.home() / "a.jsonl"


def test_urls_secrets_and_the_run_come_from_the_environment_first(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        MINIMAL + '[redis]\nbuffer_url = "redis://file:1/0"\n',
        ROLLQ_REDIS_URL="redis://environment:2/0",
        ROLLQ_QUEUE_URL="redis://queue:3/0",
        ROLLQ_REDIS_PASSWORD="hunter2",
        ROLLQ_RUN="other",
    )
    assert (settings.redis.buffer_url, settings.redis.queue_url) == ("redis://environment:2/0", "redis://queue:3/0")
    assert settings.redis.password is not None
    assert settings.redis.password.get_secret_value() == "hunter2"
    assert settings.run == "other"
    assert "hunter2" not in repr(settings)


def test_the_password_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    settings = load(tmp_path, ROLLQ_REDIS_PASSWORD_FILE=str(tmp_path / "secret"))
    assert settings.redis.password is not None
    assert settings.redis.password.get_secret_value() == "hunter2"


def test_user_and_files_of_tls_come_from_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MINIMAL + '[redis]\nbuffer_url = "rediss://h/0"\nuser = "r-worker"\nca_file = "tls/ca.crt"\n'
    location = RunLocation.from_settings(load(tmp_path, text))
    assert location.buffer_url == f"rediss://r-worker@h/0?ssl_ca_certs={quote(str(tmp_path / 'tls/ca.crt'), safe='')}"
    assert location.queue_url == location.buffer_url
    monkeypatch.chdir(tmp_path.parent)
    given = {"ROLLQ_REDIS_USER": "r-monitor", "ROLLQ_REDIS_CA_FILE": "ca.crt", "ROLLQ_REDIS_PASSWORD": "hunter2"}
    ca_file = quote(str(tmp_path.parent / "ca.crt"), safe="")
    location = RunLocation.from_settings(load(tmp_path, text, **given))
    assert location.buffer_url == f"rediss://r-monitor@h/0?ssl_ca_certs={ca_file}"
    location = RunLocation.at("rediss://other/1", "r", given)
    assert location.buffer_url == f"rediss://r-monitor@other/1?ssl_ca_certs={ca_file}"
    assert location.queue_url == location.buffer_url
    assert location.password == "hunter2"
    assert "hunter2" not in repr(location)
    location = RunLocation.at("redis://a:1,b:2/0", "r", {"ROLLQ_QUEUE_URL": "redis://queue:3/0"})
    assert (location.buffer_url, location.queue_url) == ("redis://a:1,b:2/0", "redis://queue:3/0")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("group_sise = 8", "rollq.toml: tasks.math.group_sise: unknown key; did you mean 'group_size'?"),
        ('group_size = "8"', "rollq.toml: tasks.math.group_size = '8': must be a whole number"),
        ("group_size = 0", "tasks.math.group_size = 0: must be greater than 0"),
        ("staleness.partial_rollout = 1", "tasks.math.staleness.partial_rollout = 1: must be true or false"),
        ("temperature = nan", "tasks.math.temperature = nan: must be greater than or equal to 0"),
        ("temperature = 0", "tasks.math: temperature = 0: all samples of a group would be the same"),
        (
            'curriculum.prompt_order = { column = "level" }',
            "tasks.math.curriculum.prompt_order: by: is required, but missing; column: unknown key",
        ),
        (
            "curriculum.prompt_order = 5",
            "tasks.math.curriculum.prompt_order = 5: must be a string in quotes, or a table",
        ),
        (
            'batches.order = "lifo"',
            "tasks.math.batches.order = 'lifo': must be 'staleness', 'arrival', 'newest', 'uniform' or 'priority'",
        ),
        ("limits.min_valid_samples = 9", "tasks.math: min_valid_samples = 9: must not exceed group_size = 8"),
        ('[tasks.code]\nprompts = ""\nbatch_groups = 1', "tasks.code.prompts = '': is empty; write a path"),
        ('[tasks.code]\nprompts = "p"\nbatch_groups = 1\n[redis]\nca_file = ""', "redis.ca_file = '': is empty"),
        ("limits.audit_groups = 1000000000000000", "limits.audit_groups = 1000000000000000: must be less than 1"),
        ("batches.schedule = [[1000000000000000, 2]]", "must be less than 1000000000000000"),
        ("judge_options.digits = 9223372036854775808", "judge_options.digits = 9223372036854775808: must have at most"),
        (
            "max_staleness = 1000000000000\nstaleness.sync_weights_interval = 1000",
            "max_staleness = 1000000000000: together with sync_weights_interval = 1000 it allows",
        ),
        ("limits.lease_s = inf", "tasks.math.limits.lease_s = inf: must be a finite number"),
        ("limits.lease_s = 0.5", "tasks.math.limits.lease_s = 0.5: must be greater than or equal to 1"),
        ("limits.lease_s = 1e10", "tasks.math.limits.lease_s = 10000000000.0: must be at most 1000000000 seconds"),
        ("[worker]\njudge_timeout_s = 1e300", "worker.judge_timeout_s = 1e+300: must be at most 1000000000 seconds"),
        ("max_tokens = 8.0", "tasks.math.max_tokens = 8.0: must be a whole number"),
        ("rows.prompt_field = 2001-02-03", "tasks.math.rows.prompt_field: must be a string in quotes"),
        ('[tasks.code]\nprompts = "p"\nbatch_groups = 1001', "tasks.code.batch_groups = 1001: must be less than or"),
        ('[tasks."a:b"]\nprompts = "p"\nbatch_groups = 1', "task name 'a:b': 1 to 64 characters of A-Z a-z 0-9"),
        (
            '[tasks.code]\nprompts = "p"\nbatch_groups = 1\nstaleness.sync_weights_interval = 2',
            "tasks.*.staleness.sync_weights_interval: must be the same for every task of a run, not {'math': 1, ",
        ),
        ('judge = "environment"', 'adds up the rewards of an environment, but agent_loop = "single_turn" has none'),
        ("judge = 3", "tasks.math.judge = 3: must be a string in quotes, or a table"),
        ('judge = { math = "math" }', "tasks.math.judge: field: must name the column that chooses the judge"),
        (
            'judge = { field = "source" }',
            "tasks.math.judge: names no judge: add one for each value of the column 'source'",
        ),
        (
            'judge = { field = "source", a = 1 }',
            "tasks.math.judge: a = 1: must be a judge's name in quotes, or a table",
        ),
        (
            'judge = { field = "source", a = "none" }',
            "tasks.math.judge: a = 'none': 'none' gives no reward; name another judge",
        ),
        ('judge = { field = "source", a = [] }', "tasks.math.judge: a = []: must name a judge"),
        (
            'judge = { field = "source", a = { judge = "b.c", wieght = 2 } }',
            "tasks.math.judge: a.wieght: unknown key; did you mean 'weight'?",
        ),
        (
            'judge = { field = "source", a = ["b.c", { judge = "b.d", weight = "2" }] }',
            "tasks.math.judge: a[1].weight = '2': must be a number",
        ),
        ('judge = { field = "source", a = ["b.c", "d.c"] }', "tasks.math.judge: a: several judges have the same name"),
        (
            'judge = { field = "source", a = "environment" }',
            'judge = "environment" adds up the rewards of an environment, but',
        ),
        (
            'judge = { field = "source", a = "math" }\njudge_options = { x = 1 }',
            "judge_options: judge is a table, so options belong to one of its judges",
        ),
        (
            'judge = { field = "source", a = "math" }\nrows.answer_field = ""',
            'judge.a compares with the answer of each prompt, but rows.answer_field = ""',
        ),
        (
            'judge = { field = "source", a = "math" }\nrows.metadata_fields = ["level"]',
            'judge.field = "source": rows.metadata_fields leaves this column out',
        ),
        (
            '[evaluations.test]\nprompts = "c"\njudge = { field = 1, a = "math" }',
            "evaluations.test.judge: field: must name the column",
        ),
        (
            'rows.answer_field = ""',
            'judge = "exact_match" compares with the answer of each prompt, but rows.answer_field = ""',
        ),
        (
            "max_staleness = 0\nbatches.max_uses = 3",
            "max_uses = 3: 1 train step after its first use, every group is too old",
        ),
        (
            "max_staleness = 2\nbatches.max_uses = 2\nbatches.reuse_cooldown_steps = 2",
            "max_uses = 2: 3 train steps after its first",
        ),
        ('[producer]\nstrategy = "sync"\nover_sample = 1', "producer: over_sample needs strategy = 'async'"),
        (
            '[producer]\nstrategy = "sync"\nadaptive_over_sample = true',
            "producer: adaptive_over_sample needs strategy = 'async'",
        ),
        ('[worker.gateway]\nbind = "localhost"', "worker.gateway.bind = 'localhost': must be an address and a port"),
        ('[worker]\nname = "gpu 0"', "worker.name = 'gpu 0': must have 1 to 32 characters of A-Z a-z 0-9 _ -"),
        (
            'batches.max_uses = 2\nbatches.reuse_cooldown_steps = 1\nmax_staleness = 3\n[producer]\nstrategy = "sync"',
            "makes no replacement for groups that cool down",
        ),
        ("batches.schedule = [[3, 0], [5, 4]]", "tasks.*.batches.schedule: no task has a group in the batch of step 3"),
        ('[redis]\nbuffer_url = "http://x"', "must begin with redis://"),
        ('[redis]\nqueue_url = "redis://:hunter2@"', "redis://***@"),
        ("[producers]", "producers: unknown key; did you mean 'producer'?"),
        ("sampling.min_p = 1.5", "tasks.math.sampling.min_p = 1.5: must be less than or equal to 1"),
        (
            "sampling.presence_penalty = -2.5",
            "tasks.math.sampling.presence_penalty = -2.5: must be greater than or equal to -2",
        ),
        (
            "sampling.stop_token_ids = [-1]",
            "tasks.math.sampling.stop_token_ids.0 = -1: must be greater than or equal to 0",
        ),
        ('sampling.bad_words = [""]', "tasks.math.sampling.bad_words.0 = '': must have at least 1 character"),
        ("sampling.logit_bias = { end = 1.0 }", "tasks.math.sampling.logit_bias.end"),
        ("sampling.min_tokens = 2000", "tasks.math: min_tokens = 2000: must not exceed max_tokens = 1024"),
        (
            'sampling.guided_json = {}\nsampling.guided_regex = "a"',
            "tasks.math: guided_json and guided_regex: only one can guide a sample; leave the other out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_message(tmp_path: Path, more: str, message: str) -> None:
    found = problem(tmp_path, more=more)
    assert message in found
    assert "hunter2" not in found


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_groups_of_one_that_would_train_nothing_are_refused(tmp_path: Path, baseline: str) -> None:
    asked = f'[trainer.advantages]\nbaseline = "{baseline}"'
    found = problem(tmp_path, more="group_size = 1", trainer=asked)
    assert f'tasks.math.group_size = 1: with trainer.advantages.baseline = "{baseline}" every advantage is 0' in found


@pytest.mark.parametrize("component", ["sft", "distillation"])
def test_groups_of_one_can_be_imitated_or_distilled(tmp_path: Path, component: str) -> None:
    asked = f"[trainer.loss]\n{component} = {{ math = 0.1 }}"
    assert load(tmp_path, more="group_size = 1", trainer=asked).tasks["math"].group_size == 1


def test_a_teacher_that_tells_one_logprob_cannot_be_followed_on_several(tmp_path: Path) -> None:
    pool = '\n[worker.pools.teacher]\nurls = ["http://teacher/v1"]\nserved_model = "teacher"\n'
    asked = '[trainer.loss]\ndistillation = { math = 1.0 }\ndistilled_tokens = "top_k"' + pool
    with pytest.raises(ConfigError, match=r"worker.pools.teacher has top_k = 0.* set top_k = 8 there"):
        load(tmp_path, more='judging.scorers = ["teacher"]', trainer=asked)
    load(tmp_path, more='judging.scorers = ["teacher"]', trainer=asked + "top_k = 4\n")
    load(tmp_path, trainer=asked)  # an agent loop may set the arrays


def test_groups_must_be_larger_than_the_draws_of_pass_at_k(tmp_path: Path) -> None:
    asked = "[trainer.advantages]\npass_k = 4"
    with pytest.raises(ConfigError, match=r"tasks\.math\.group_size = 4: .*pass_k = 4 .* groups of 5 or more"):
        load(tmp_path, more="group_size = 4", trainer=asked)
    assert load(tmp_path, more="group_size = 5", trainer=asked).tasks["math"].group_size == 5


@pytest.mark.parametrize("compared", ['baseline = "opo"', "pass_k = 2"])
def test_credit_of_turns_refuses_what_compares_whole_samples(tmp_path: Path, compared: str) -> None:
    with pytest.raises(ConfigError, match=r'credit = "turns": .* compare whole samples; leave them out'):
        load(tmp_path, trainer=f'credit = "turns"\n[trainer.advantages]\n{compared}')


def test_groups_of_one_can_be_compared_with_the_batch(tmp_path: Path) -> None:
    asked = '[trainer.advantages]\nbaseline = "batch"\nscale = "batch"'
    assert load(tmp_path, more="group_size = 1", trainer=asked).tasks["math"].group_size == 1


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            "checkpoint_every = 101",
            "trainer.checkpoint_every = 101: must not exceed tasks.math.batches.max_uncheck",
        ),
        ("micro_batch_tokens = 5000", "trainer.micro_batch_tokens = 5000: must hold one sample of tasks.math"),
        ("evaluate_every = 5", "trainer.evaluate_every = 5: there is nothing to evaluate"),
        ("evaluation_timeout_s = 9.0", "trainer.evaluation_timeout_s: no longer a setting: an evaluation may take any"),
        ("learning_rat = 1.0", "trainer.learning_rat: unknown key; did you mean 'learning_rate'?"),
        ("clip_high = 0.2", "trainer.clip_high: unknown key; did you mean trainer.loss.clip_high?"),
        ("[trainer.loss]\nclip_lo = 1", "trainer.loss.clip_lo: unknown key; did you mean 'clip_low'?"),
    ],
)
def test_a_trainer_that_does_not_fit_the_tasks_is_refused(tmp_path: Path, trainer: str, message: str) -> None:
    assert message in problem(tmp_path, trainer=trainer)


@pytest.mark.parametrize("text", ['run = "r', "run = 1\nrun = 2", "\x00"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "rollq.toml: not TOML: " in problem(tmp_path, text)


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    assert "tasks: is required, but missing" in problem(tmp_path, 'run = "r"\n')


def test_a_bad_value_of_the_environment_names_its_variable(tmp_path: Path) -> None:
    assert problem(tmp_path, ROLLQ_RUN="a b").endswith("(from ROLLQ_RUN)")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml' cannot be read: No such file"):
        load_settings(tmp_path / "none.toml", {})


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rollq.toml").write_bytes(b'run = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        load_settings(tmp_path / "rollq.toml", {})


def test_a_password_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    environment: Mapping[str, str] = {"ROLLQ_REDIS_PASSWORD_FILE": str(tmp_path / "none")}
    assert "ROLLQ_REDIS_PASSWORD_FILE" in problem(tmp_path, **environment)


SHARED = """
run = "r"
[batch]
groups = 7
schedule = [{ step = 10, groups = 4 }, { step = 20, weights = { code = 2.0 } }]
[tasks.math]
prompts = "math.jsonl"
batches.weight = 2.0
[tasks.code]
prompts = "code.jsonl"
"""


def test_one_batch_is_shared_by_the_tasks_weights_and_changes_by_step(tmp_path: Path) -> None:
    path = tmp_path / "rollq.toml"
    path.write_text(SHARED)
    tasks = load_settings(path, {}).tasks
    assert {name: (task.batch_groups, task.schedule) for name, task in tasks.items()} == {
        "math": (5, ((10, 3), (20, 2))),
        "code": (2, ((10, 1), (20, 2))),
    }


def test_xp09_a_task_of_weight_0_takes_no_part_until_it_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "rollq.toml"
    weights = {"a": 2, "b": 1, "c": 0}
    tables = "".join(f'[tasks.{name}]\nprompts = "p"\nbatches.weight = {weight}\n' for name, weight in weights.items())
    path.write_text(f'run = "r"\n[batch]\ngroups = 7\n{tables}')
    assert {name: task.batch_groups for name, task in load_settings(path, {}).tasks.items()} == {"a": 5, "b": 2, "c": 0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batches.weight = 2.0", "batches.weight = -1.0", "task 'math': weight -1.0 must be a number, 0 or more"),
        ("batches.weight = 2.0", 'batches.weight = "2"', "tasks.math.batches.weight = '2': must be a number"),
        ("batches.weight = 2.0", "batch_groups = 3", "tasks.math.batch_groups: [batch] sets the size of batches"),
        ("batches.weight = 2.0", "batches.weight = 0.001", "tasks.math: gets no group of any batch"),
        ("code = 2.0", "sort = 2.0", "names task 'sort', which does not exist"),
        ("step = 10, groups = 4", "step = 10, groups = 0", "batch.schedule.0.groups = 0: must be greater than 0"),
        ("step = 10", "step = 1", "batch.schedule.0.step = 1: must be greater than 1"),
        ("step = 10", "step = 20", "batch.schedule: step 20 is listed twice; steps must increase"),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\nstaleness.tail_batch_trigger_size = -1\nstaleness.tail_batch_max_tries = 2',
            "tail_batch_trigger_size = -1 drops expired groups",
        ),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\n[evaluations.code]\nprompts = "c"',
            "'code' is a task and an evaluation: give them different names",
        ),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\n[evaluations.test]\nprompts = "c"\nmax_staleness = 2',
            "max_staleness: an evaluation is never trained, so leave this out",
        ),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\n[evaluations.test]\nprompts = "c"\njudging.group_judge = "a.b"',
            "judging.group_judge: an evaluation is never trained, so leave this out",
        ),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\n[evaluations.test]\nprompts = "c"\njudge = "none"',
            'judge = "none" gives no reward',
        ),
        (
            'prompts = "code.jsonl"',
            'prompts = "c"\n[evaluations.test]\nprompts = "c"\njudging.scorers = ["teacher"]\nfilters = ["overlong"]',
            "filters, judging.scorers: an evaluation is never trained, so leave these out",
        ),
    ],
)
def test_settings_that_make_no_sense_together_are_refused_with_the_reason(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "rollq.toml"
    assert old in SHARED
    path.write_text(SHARED.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        load_settings(path, {})
    assert message in str(refused.value)


RARE = {
    "min_p": ("0.1", 0.1),
    "min_tokens": ("5", 5),
    "repetition_penalty": ("1.2", 1.2),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "logit_bias": ("{ 40 = -3.0 }", {"40": -3.0}),
    "bad_words": ('["no"]', ("no",)),
    "guided_json": (
        '{ type = "object", additionalProperties = false }',
        {"type": "object", "additionalProperties": False},
    ),
    "guided_regex": ('"yes|no"', "yes|no"),
}
"""Sampling parameters that change the distribution: each with a value in TOML, and in the settings."""


@pytest.mark.parametrize("key", RARE)
def test_sampling_that_the_trainer_cannot_follow_is_refused_in_tasks_and_allowed_in_evaluations(
    tmp_path: Path, key: str
) -> None:
    written, value = RARE[key]
    found = problem(tmp_path, more=f"sampling.{key} = {written}")
    assert f"tasks.math: {key} = {value!r}: changes the distribution that tokens are drawn from" in found
    evaluation = f'[evaluations.test]\nprompts = "p"\nsampling.{key} = {written}\n'
    task = load(tmp_path, more=f'{evaluation}[worker]\nengine = "vllm"').all_tasks()["test"]
    assert task.sampling(7).rare() == {key: value}
    if key == "min_p":
        load(tmp_path, more=evaluation)
    else:
        refused = f"evaluations.test.sampling.{key}: engine 'transformers' does not support it"
        assert refused in problem(tmp_path, more=evaluation)


def test_a_task_may_choose_the_tokens_that_end_its_samples(tmp_path: Path) -> None:
    task = load(tmp_path, more="sampling.ignore_eos = true\nsampling.stop_token_ids = [7, 8]").tasks["math"]
    assert task.sampling(None).rare() == {"ignore_eos": True, "stop_token_ids": (7, 8)}


def test_an_evaluation_at_temperature_0_is_greedy(tmp_path: Path) -> None:
    task = load(tmp_path, more='[evaluations.test]\nprompts = "p"\ntemperature = 0').all_tasks()["test"]
    assert (task.sampling(7).temperature, task.sampling(7).top_k) == (1.0, 1)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("99999999999999999999", "seed = 99999999999999999999: must be less than 1000000000000000"),
        ("1000000000000000", "seed = 1000000000000000: must be less than 1000000000000000"),
        ("-1", "seed = -1: must be greater than or equal to 0"),
    ],
)
def test_a_seed_that_a_role_cannot_use_is_refused(tmp_path: Path, seed: str, message: str) -> None:
    assert message in problem(tmp_path, MINIMAL.replace('run = "r"', f'run = "r"\nseed = {seed}'))


def test_the_largest_seed_that_redis_functions_take_is_allowed(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL.replace('run = "r"', 'run = "r"\nseed = 999999999999999')).seed == 999_999_999_999_999

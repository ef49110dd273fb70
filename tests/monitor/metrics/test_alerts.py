"""The alerts of compose/alerts.yaml: each fires after its time by the series that it is about, and one by a real
Prometheus that watches a run. `tests/e2e/test_alerts.py` fires each by a run that is broken on purpose."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollq.buffer.buffer import Buffer
from support.buffer_run import World
from support.dashboard import serving
from support.prometheus import RULES, watching

pytestmark = pytest.mark.usefixtures("forks")

RULE: Mapping[str, Mapping[str, Any]] = {
    rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
}
STEPS = 240
"""Scrapes of a minute's quarter: an hour."""
HEALTHY = {
    'up{job="rollq"}': "1",
    'rollq_up{run="r"}': "1",
    'rollq_state{run="r", state="training"}': "1",
    'rollq_state{run="r", state="starving"}': "0",
    'rollq_trainer_phase{run="r", phase="training"}': "1",
    'rollq_memory_used_ratio{run="r"}': "0.5",
    'rollq_trainer_mismatch_nats{run="r"}': "0.03",
    'rollq_worker_unrewarded_ratio{run="r", worker="a"}': "0.02",
    'rollq_worker_unrewarded_ratio{run="r", worker="b"}': "0.06",
    'rollq_scheduled_groups{run="r", task="t"}': "32",
    'rollq_allowed_groups{run="r", task="t"}': "32",
    'rollq_groups{run="r", task="t", status="pending"}': "0",
    'rollq_groups{run="r", task="t", status="running"}': "3",
    'rollq_expired_groups_total{run="r", task="t"}': "0+1",
    'rollq_attempts_total{run="r", task="t"}': "0+20",
}
"""Series of a run in which all is well, and whose workers are at the bound of staleness: their values, or growth."""
BROKEN: Mapping[str, Mapping[str, str]] = {
    "RollqUnreadable": {'rollq_up{run="r"}': "0"},
    "RollqTrainerGone": {'rollq_state{run="r", state="trainer gone"}': "1"},
    "RollqFailing": {'rollq_state{run="r", state="failing"}': "1"},
    "RollqMemoryFull": {'rollq_state{run="r", state="memory full"}': "1"},
    "RollqMemory": {'rollq_memory_used_ratio{run="r"}': "0.75"},
    "RollqStarving": {'rollq_state{run="r", state="starving"}': "1"},
    "RollqStalenessAtBound": {'rollq_groups{run="r", task="t", status="running"}': "0"},
    "RollqGroupsExpire": {'rollq_expired_groups_total{run="r", task="t"}': "0+3"},
    "RollqMismatch": {'rollq_trainer_mismatch_nats{run="r"}': "0.4"},
    "RollqJudgeErrors": {'rollq_worker_unrewarded_ratio{run="r", worker="b"}': "0.2"},
}
"""By alert, the series in which a broken run differs."""
RATES_S = 30
"""A rate has a value from the second scrape on."""


def series(changes: Mapping[str, str]) -> list[dict[str, str]]:
    values = {**HEALTHY, **changes}
    return [
        {"series": name, "values": f"{value}x{STEPS}" if "+" in value else f"{value}+0x{STEPS}"}
        for name, value in values.items()
    ]


def firing_after_s(changes: Mapping[str, str], *expected: tuple[int, str]) -> dict[str, Any]:
    """A test of promtool that at these times exactly the alert with this name fires, or no alert."""
    return {
        "interval": "15s",
        "input_series": series(changes),
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, severity) (ALERTS{alertstate="firing"})',
                "eval_time": f"{at_s}s",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}", severity="{RULE[name]["labels"]["severity"]}"}}', "value": 1}
                ]
                if name
                else [],
            }
            for at_s, name in expected
        ],
    }


def wait_s(alert: str) -> int:
    return int(RULE[alert]["for"].removesuffix("m")) * 60


def promtool(prometheus: Path, folder: Path, *tests: dict[str, Any]) -> None:
    (folder / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": list(tests)}), "utf-8"
    )
    done = subprocess.run(
        [prometheus.with_name("promtool"), "test", "rules", folder / "tests.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(prometheus: Path) -> None:
    done = subprocess.run([prometheus.with_name("promtool"), "check", "rules", RULES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(BROKEN)} rules found" in done.stdout


def test_each_alert_has_a_broken_run_and_says_how_bad_it_is_and_what_to_do() -> None:
    assert list(RULE) == list(BROKEN)
    for rule in RULE.values():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "$labels.run" in rule["annotations"]["summary"]


def test_each_alert_fires_after_its_time_and_no_other_does(prometheus: Path, tmp_path: Path) -> None:
    broken = [
        firing_after_s(changes, (wait_s(alert) - 15, ""), (wait_s(alert) + RATES_S, alert))
        for alert, changes in BROKEN.items()
    ]
    promtool(prometheus, tmp_path, *broken)


def test_no_alert_fires_for_a_run_in_which_all_is_well(prometheus: Path, tmp_path: Path) -> None:
    promtool(prometheus, tmp_path, firing_after_s({}, *((at_s, "") for at_s in range(0, 3600, 300))))


def test_a_trainer_that_waits_now_and_then_does_not_starve(prometheus: Path, tmp_path: Path) -> None:
    waits = {'rollq_state{run="r", state="starving"}': " ".join(["1+0x40 0+0x2"] * 5)}
    made = firing_after_s({}, (3500, ""))
    made["input_series"] = [entry for entry in made["input_series"] if "starving" not in entry["series"]]
    made["input_series"] += [{"series": name, "values": values} for name, values in waits.items()]
    promtool(prometheus, tmp_path, made)


def test_a_metrics_process_that_is_gone_is_unreadable_too(prometheus: Path, tmp_path: Path) -> None:
    gone = {'up{job="rollq"}': "0"}
    promtool(prometheus, tmp_path, firing_after_s(gone, (wait_s("RollqUnreadable") + 15, "RollqUnreadable")))


def test_the_check_notices_a_rule_that_does_not_fire(prometheus: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="RollqMemory"):
        promtool(prometheus, tmp_path, firing_after_s({}, (3500, "RollqMemory")))


def test_a_real_prometheus_fires_for_a_real_run_and_falls_silent_again(
    buffer: Buffer, server_url: str, prometheus: Path, tmp_path: Path
) -> None:
    world = World(buffer).start(math={})
    buffer.report_worker("worker-1", {"state": "serving", "judged": 100, "unrewarded": 0.08})
    with (
        serving("--url", server_url, "--run", buffer.run, name="metrics") as address,
        watching(prometheus, tmp_path, address) as watcher,
    ):
        fired = watcher.until_firing("RollqJudgeErrors")
        assert fired["labels"] == {"alertname": "RollqJudgeErrors", "run": buffer.run, "severity": "warning"}
        assert fired["annotations"]["summary"] == f"{buffer.run}: judges fail for 8% of the samples"
        world.buffer.report_worker("worker-1", {"state": "serving", "judged": 100, "unrewarded": 0.0})
        watcher.until_silent("RollqJudgeErrors")


@pytest.mark.parametrize("alert", RULE)
def test_an_alert_names_no_value_that_its_series_lack(alert: str) -> None:
    texts = " ".join(RULE[alert]["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= {"run", "task", "instance"}

"""The tables of XTuner's and Trinity-RFT's settings: they are complete, and their equivalents exist."""

from pathlib import Path
from typing import Literal

import pytest

from rollq.cli.settings.migration.keys import default_of, field_at
from rollq.cli.settings.migration.plain import is_plain
from rollq.cli.settings.migration.table import ABSENT, system
from rollq.cli.settings.reference import reference

DATA = Path(__file__).parents[2] / "data" / "migration"

Name = Literal["xtuner", "trinity"]
both = pytest.mark.parametrize("name", ["xtuner", "trinity"])


def fields_of(name: Name) -> dict[str, set[str]]:
    """Class -> names of its fields in the other system."""
    lines = (DATA / f"{name}-fields.txt").read_text("utf-8").splitlines()
    split = (line.partition(":") for line in lines if not line.startswith("#"))
    return {group: set(names.split()) for group, _, names in split}


@both
def test_the_table_has_every_field_and_no_other(name: Name) -> None:
    expected, table = fields_of(name), system(name)
    missing = {group: left for group, names in expected.items() if (left := names - table.fields(group).keys())}
    invented = {group: left for group, own in table.groups.items() if (left := own.keys() - expected.get(group, set()))}
    assert (missing, invented) == ({}, {})
    assert sum(map(len, expected.values())) > 250
    assert expected.keys() == table.groups.keys()


@both
def test_the_version_is_the_one_from_which_the_fields_were_read(name: Name) -> None:
    head = (DATA / f"{name}-fields.txt").read_text("utf-8").partition("\n")[0]
    assert f"{system(name).name} {system(name).version}" in head


@both
def test_every_equivalent_is_a_key(name: Name) -> None:
    keys = {key for group in system(name).groups.values() for setting in group.values() for key in setting.keys}
    assert [key for key in sorted(keys) if field_at(key.replace("NAME", "x")) is None] == []
    assert len(keys) > 40


@both
def test_every_key_that_a_text_names_exists(name: Name) -> None:
    known = {setting.key for table in reference() for setting in table.settings}
    texts = [text for group in system(name).groups.values() for one in group.values() for text in (one.text, one.note)]
    roots = ("tasks.", "trainer.", "worker.")
    quoted = {word for text in texts for word in text.split("`")[1::2] if word.startswith(roots)}
    paths = {word.partition(" ")[0] for word in quoted}
    assert [path for path in sorted(paths) if path.rpartition(".")[2] not in known] == []
    assert len(paths) > 10


@both
def test_a_setting_that_is_copied_has_one_key(name: Name) -> None:
    copied = [one for group in system(name).groups.values() for one in group.values() if one.kind == "copied"]
    assert [one.name for one in copied if len(one.keys) != 1] == []
    assert all(one.default is ABSENT or is_plain(one.default) for one in copied)


@both
def test_every_table_that_a_setting_leads_to_exists(name: Name) -> None:
    table = system(name)
    led = {one.text for group in table.groups.values() for one in group.values() if one.kind == "table"}
    assert led <= table.groups.keys()
    assert set(table.bases) | set(table.bases.values()) <= table.groups.keys() | {"Config"}


def test_defaults_are_those_of_the_models() -> None:
    assert default_of("tasks.x.group_size") == 8
    assert default_of("tasks.x.sampling.top_p") == 1.0
    assert default_of("trainer.advantages.deviation") == "population"
    assert default_of("trainer.lora.rank") == 16
    assert default_of("trainer.model") is None
    assert [field_at(key) for key in ("tasks.x.top_p", "trainer.loss.nothing", "nothing", "run.x")] == [None] * 4

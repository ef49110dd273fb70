"""docs/guide/gpus.md: rollq accepts the settings, and has the options of the commands."""

import tomllib

from click.testing import CliRunner

from rollq.cli.main import main
from rollq.cli.settings.model import RollqSettings
from support.documented_commands import ROOT, blocks

PAGE = ROOT / "docs" / "guide" / "gpus.md"


def test_the_settings_are_accepted() -> None:
    (settings,) = [block.code for block in blocks(PAGE) if block.language == "toml"]
    read = RollqSettings.model_validate(tomllib.loads(settings))
    assert read.worker.samples_in_flight is None
    assert read.worker.options["engine_args"]["tensor_parallel_size"] == 2


def test_the_commands_have_the_options_that_they_are_given() -> None:
    (lines,) = [block.code.splitlines() for block in blocks(PAGE) if block.language == "bash"]
    for line in lines:
        words = line.removesuffix(" &").split()
        words = words[words.index("rollq") + 1 :]
        shown = CliRunner().invoke(main, [words[0], "--help"])
        assert shown.exit_code == 0
        assert all(word in shown.output for word in words if word.startswith("--"))

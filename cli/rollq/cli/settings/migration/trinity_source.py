"""A Trinity-RFT file's tables, each with the settings taken from it."""

from collections.abc import Mapping
from typing import Any, Final

from rollq.cli.settings.migration.conversion import Given
from rollq.cli.settings.migration.trinity_verl import Verl
from rollq.cli.settings.migration.values import Placeholder

ENOUGH_STEPS: Final = 1_000_000
"""Train steps of a run whose end is given as a number of passes over the prompts."""


class Source:
    """A Trinity file's tables, each with the settings taken from it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.root = Given("Config", data, "")
        self.algorithm = below(self.root, "algorithm", "AlgorithmConfig")
        self.model = below(self.root, "model", "ModelConfig")
        self.tinker = below(self.model, "tinker", "TinkerConfig")
        self.external = below(self.model, "external_model", "ExternalModelConfig")
        self.buffer = below(self.root, "buffer", "BufferConfig")
        self.explorer = below(self.root, "explorer", "ExplorerConfig")
        self.engine = below(self.explorer, "rollout_model", "InferenceModelConfig")
        self.timeout = below(self.explorer, "dynamic_timeout", "DynamicTimeoutConfig")
        self.trainer = below(self.root, "trainer", "TrainerConfig")
        self.verl = Verl(self.trainer)
        self.optimizer = self._optimizer()
        self.sync = below(self.root, "synchronizer", "SynchronizerConfig")
        self.monitor = below(self.root, "monitor", "MonitorConfig")
        self.input = below(self.buffer, "explorer_input", "ExplorerInput")
        self.trainer_input = below(self.buffer, "trainer_input", "TrainerInput")
        self.experience = below(self.trainer_input, "experience_buffer", "ExperienceBufferConfig")
        self.replay = below(self.experience, "replay_buffer", "ReplayBufferConfig")
        processor = below(self.root, "data_processor", "DataProcessorConfig")
        self.pipeline = below(processor, "experience_pipeline", "ExperiencePipelineConfig")
        self.all = [
            self.algorithm, self.optimizer, self.model, self.tinker, self.external, self.buffer, self.explorer,
            self.engine, self.timeout, self.trainer, self.sync, self.monitor, self.input, self.trainer_input,
            self.experience, self.replay, processor, self.pipeline, self.root,
        ]  # fmt: skip

    def _optimizer(self) -> Given:
        """The optimizer's settings: verl's own settings, if any, or else `algorithm.optimizer`."""
        given = below(self.algorithm, "optimizer", "OptimizerConfig")
        self.replaced = {name: given.fields[name] for name in self.verl.optimizer if name in given.fields}
        where = given.where if given.fields else self.verl.where_of_optimizer
        return Given(given.group, {**given.fields, **self.verl.optimizer}, where)


def below(owner: Given, name: str, group: str) -> Given:
    """The settings of a table in `owner`; none for any other value."""
    value = owner.fields.get(name)
    if isinstance(value, dict):
        owner.taken.add(name)
    return Given(group, value if isinstance(value, dict) else {}, f"{owner.where}{name}.")


def text_of(value: Any, default: str = "") -> str:
    """A string, including the names of environment variables."""
    return value if isinstance(value, str) else value.text if isinstance(value, Placeholder) else default

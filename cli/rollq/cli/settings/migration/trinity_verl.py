"""verl's own settings, which a Trinity-RFT file has in `trainer.trainer_config`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.values import shown

KEYS: Final = {
    "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "log_prob_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "grad_clip": "trainer.gradient_clip",
    "max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""verl's setting that Trinity-RFT also has -> rollq's key."""


class Verl:
    """verl's settings: in `trainer_config.actor_rollout_ref` or, without that table, in `trainer_config`."""

    def __init__(self, trainer: Given) -> None:
        self.where = f"{trainer.where}trainer_config"
        self.settings = _table(trainer.fields, "trainer_config")
        self._wrapper = "actor_rollout_ref." if "actor_rollout_ref" in self.settings else ""
        inner = _table(self.settings, "actor_rollout_ref") if self._wrapper else self.settings
        self.optimizer = _table(_table(inner, "actor"), "optim")
        self.model = _table(inner, "model")
        self.where_of_optimizer = f"{self.where}.{self._wrapper}actor.optim."

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every setting with its place, without the actor's optimizer."""
        for where, value in _leaves(self.where, self.settings):
            if not where.startswith(self.where_of_optimizer):
                yield where, value


def convert_verl(run: Conversion, trainer: Given, verl: Verl) -> None:
    """Convert verl's settings that rollq has, and add a comment for each of the others."""
    saves = verl.model.get("enable_gradient_checkpointing", True)
    run.set("trainer.checkpoint_activations", saves if isinstance(saves, bool) else True)
    if not verl.settings:
        return
    trainer.taken.add("trainer_config")
    for where, value in verl.leaves():
        name = where.rpartition(".")[2]
        if where.endswith("model.enable_gradient_checkpointing"):
            run.converted += 1
        elif ".critic." in where:
            run.without += 1
            run.written.comment(f"{where} = {shown(value)}", "none, because rollq train has no critic")
        elif name in KEYS:
            run.elsewhere += 1
            run.written.comment(f"{where} = {shown(value)}", f"see {KEYS[name]}, from Trinity-RFT's own setting")
        else:
            run.without += 1
            run.written.comment(
                f"{where} = {shown(value)}", "none, because it belongs to verl, and `rollq train` trains"
            )


def _table(owner: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = owner.get(name)
    return value if isinstance(value, dict) else {}


def _leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{where}.{name}", item)
    else:
        yield where, value

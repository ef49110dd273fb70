"""XTuner's losses, corrections and advantages as `[trainer.loss]` and `[trainer.advantages]`."""

from typing import Any, Final

from rollq.cli.settings.migration.conversion import UNREAD, Conversion, Given
from rollq.cli.settings.migration.names import dotted
from rollq.cli.settings.migration.readings import a_number
from rollq.cli.settings.migration.values import REST
from rollq.cli.settings.migration.xtuner_tasks import made

KL: Final = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
LOSS: Final = "trainer.loss."
ADVANTAGES: Final = "trainer.advantages."


def convert_loss(run: Conversion, worker: Given, advantages: Given) -> None:
    """The tables `[trainer.loss]` and `[trainer.advantages]`."""
    loss = made(worker.fields.get("loss_cfg"), "GRPOLossConfig")
    worker.taken.add("loss_cfg")
    policy = made(loss.fields.get("policy_loss_cfg"), "policy_loss_cfg")
    policy.group = "policy_loss_cfg"
    loss.taken.add("policy_loss_cfg")
    if loss.group == "OrealLossConfig":
        _custom(
            run, loss, "positive_loss_factor", "losses.oreal", "OREAL: write this function, see docs/guide/losses.md"
        )
        loss.taken |= {"positive_loss_factor", "negative_loss_factor", "pos_sft_loss_weight", "pos_policy_loss_weight"}
    elif isinstance(name := run.word(policy, "loss_type"), str) and name != "vanilla":
        _custom(run, policy, "loss_type", dotted(name, "losses"), f"{name} in XTuner: write it with rollq's arguments")
    else:
        run.put(policy, "loss_type", "trainer.loss.preset", "ppo", note="XTuner's losses are means over tokens")
        run.copy(policy)
    if REST in loss.fields:
        run.written.note(("trainer", "loss", "preset"), UNREAD)
    run.set("trainer.loss.old_logprobs", "recomputed", note="as XTuner does before a batch's first update")
    _correction(run, made(loss.fields.get("rollout_is"), "RolloutImportanceSampling"))
    loss.taken.add("rollout_is")
    _kl(run, loss)
    chunk, mode = run.whole(loss, "chunk_size"), loss.fields.get("mode")
    if mode == "chunk":
        run.put(loss, "chunk_size", "trainer.logprob_chunk", chunk)
    _advantages(run, advantages)
    for given in (policy, loss, advantages):
        run.rest(given)


def _custom(run: Conversion, given: Given, name: str, path: str, note: str) -> None:
    run.put(given, name, "trainer.loss.preset", path, note=note)


def _correction(run: Conversion, given: Given) -> None:
    """Set the correction for the difference between engine and trainer."""
    weights = _pair(run.take(given, "rollout_is_threshold"))
    mode, level = run.word(given, "rollout_is_mode"), run.word(given, "rollout_is_level")
    kept = _pair(run.take(given, "rollout_is_mask_threshold")) or weights
    if weights is None or kept is None:
        run.set("trainer.loss.correction", "none")
        return
    if level == "geometric":
        _geometric(run, given, mode, kept)
        return
    run.put(given, "rollout_is_level", "trainer.loss.correction_level", level)
    if mode == "truncate":
        low = f"; XTuner also raises weights below {weights[1]:g}" if weights[1] > 0 else ""
        note = f"largest weight {weights[0]:g}{low}"
        run.put(given, "rollout_is_mode", "trainer.loss.correction", "truncated", note=note)
        run.put(given, "rollout_is_threshold", "trainer.loss.importance_cap", weights[0])
    else:
        _masked(run, given, mode, weights, kept)


def _masked(
    run: Conversion, given: Given, mode: str | None, weights: tuple[float, float], kept: tuple[float, float]
) -> None:
    note = "tokens that are left out stay in the denominator, unlike XTuner's"
    run.put(given, "rollout_is_mode", "trainer.loss.correction", "masked", note=note)
    run.put(given, "rollout_is_mask_threshold", "trainer.loss.importance_cap", kept[0])
    run.put(given, "rollout_is_mask_threshold", "trainer.loss.importance_floor", kept[1])
    if mode == "both" and (weights[0] < kept[0] or weights[1] > kept[1]):
        run.leave(given, "rollout_is_threshold", "weights inside rollout_is_mask_threshold are not clamped further")


def _geometric(run: Conversion, given: Given, mode: Any, kept: tuple[float, float]) -> None:
    run.set("trainer.loss.correction", "none")
    if mode in ("mask", "both"):
        run.set("trainer.loss.mask", "geometric")
        run.put(given, "rollout_is_mask_threshold", "trainer.loss.mask_high", kept[0])
        run.put(given, "rollout_is_mask_threshold", "trainer.loss.mask_low", kept[1])
    run.leave(given, "rollout_is_level", "geometric means mask samples in rollq, and are not weights")


def _pair(value: Any) -> tuple[float, float] | None:
    """(highest, lowest) of a threshold."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    high, low = map(a_number, value)
    return None if high is None or low is None else (float(high), float(low))


def _kl(run: Conversion, loss: Given) -> None:
    is_used, weight = run.flag(loss, "use_kl_loss"), run.number(loss, "kl_loss_coef")
    kind = run.word(loss, "kl_loss_type")
    if not is_used or not weight:
        return
    if kind in KL:
        run.put(loss, "kl_loss_coef", "trainer.loss.kl_coefficient", weight)
        run.put(loss, "kl_loss_type", "trainer.loss.kl", KL[kind])
    else:
        run.leave(
            loss, "kl_loss_type", "its gradient does not pull towards the initial model; k2 and k3 do: trainer.loss.kl"
        )
        run.leave(loss, "kl_loss_coef", "its type has no equivalent")


def _advantages(run: Conversion, given: Given) -> None:
    put = run.set
    match given.group:
        case "RLOOAdvantageConfig":
            put(f"{ADVANTAGES}baseline", "leave_one_out")
            put(f"{ADVANTAGES}scale", "none")
        case "OPOAdvantageConfig":
            put(f"{ADVANTAGES}baseline", "opo", note="weighted by loss tokens; XTuner weights by response tokens")
            put(f"{ADVANTAGES}scale", "none")
        case "PassKAdvantageConfig":
            run.copy(given)
        case "DrGRPOAdvantageConfig":
            length = run.number(given, "max_length")
            put(f"{ADVANTAGES}scale", "none", note="as in the paper; XTuner divides by the deviation")
            note = "as in the paper; XTuner scales advantages by each answer's length"
            put(f"{LOSS}aggregation", "constant", note=note)
            run.put(given, "max_length", f"{LOSS}constant_tokens", 32768 if length is None else int(length))
        case "GRPOAdvantageConfig":
            put(f"{ADVANTAGES}deviation", "sample", note="torch.std divides by n - 1")
            run.copy(given)
            _single_samples(run)
        case _:
            run.written.comment(f"advantage_estimator_config = {given.group}(...)", "not known to rollq's table")


def _single_samples(run: Conversion) -> None:
    """Groups of one have no deviation: XTuner's advantages would be NaN, and rollq refuses them."""
    sizes = [value for path, value in run.written.values.items() if path[0] == "tasks" and path[2:] == ("group_size",)]
    if sizes and min(sizes) == 1:
        run.set(f"{ADVANTAGES}baseline", "batch", note="groups of one sample have no mean to compare with")
        run.set(f"{ADVANTAGES}scale", "batch")

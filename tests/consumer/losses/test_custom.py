"""`loss = "module.function"`: what the function gets, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollq.buffer.errors import ConfigError
from rollq.consumer.losses import LossSettings, PolicyTerms, policy_terms
from rollq.consumer.losses.custom import load_loss

FUNCTIONS = """
def unclipped(new, old, behaviour, advantages, samples):
    assert new.requires_grad and not old.requires_grad and not behaviour.requires_grad
    assert samples.tolist() == [0, 0, 1]
    return -advantages * (new - old).exp()

def lacks_samples(new, old, behaviour, advantages):
    return new

async def waits(new, old, behaviour, advantages, samples):
    return new

def mean(new, **rest):
    return new.mean()

def number(new, **rest):
    return 1.0

def detached(new, advantages, **rest):
    return -advantages * new.detach()

def whole(new, **rest):
    return new.long()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with losses, importable under a name that no other test uses."""
    (tmp_path / "losses_of_a_user.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "losses_of_a_user"


def terms(loss: dict[str, Any]) -> tuple[PolicyTerms, torch.Tensor]:
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    found = policy_terms(
        LossSettings.model_validate(loss),
        new=new,
        behaviour=torch.tensor([-1.2, -1.0, -0.5]),
        advantages=torch.tensor([1.0, 1.0, -2.0]),
        samples=torch.tensor([0, 0, 1]),
        old=torch.tensor([-1.1, -1.5, -0.5]),
    )
    found.terms.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return found, new.grad


@pytest.mark.parametrize("more", [{}, {"old_logprobs": "recomputed", "importance_cap": 1.05}], ids=str)
def test_a_function_composes_with_the_other_parts_as_a_built_in_does(module: str, more: dict[str, Any]) -> None:
    found, gradient = terms({"preset": f"{module}.unclipped", **more})
    expected, expected_gradient = terms({"preset": "reinforce", **more})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(gradient, expected_gradient)


def test_its_settings_are_valid_and_need_whole_samples(module: str) -> None:
    settings = LossSettings.model_validate(f"{module}.unclipped")
    assert settings.needs_whole_samples
    assert LossSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("name", "message"),
    [("lacks_samples", "has the wrong parameters"), ("waits", "is async"), ("nothing", "has no 'nothing'")],
)
def test_a_function_that_cannot_be_called_is_refused_at_start(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"loss .*{module}.*{message}"):
        load_loss(f"{module}.{name}")


@pytest.mark.parametrize(
    ("name", "returned"), [("mean", r"torch\.float32 \[\]"), ("number", "float"), ("whole", r"torch\.int64 \[3\]")]
)
def test_terms_of_another_form_are_refused(module: str, name: str, returned: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}\": it returned {returned}; expected one term for each token, \[3\]"
    ):
        terms({"preset": f"{module}.{name}"})


def test_terms_without_a_gradient_are_refused(module: str) -> None:
    with pytest.raises(ConfigError, match=rf'loss = "{module}\.detached": it returned terms without a gradient'):
        terms({"preset": f"{module}.detached"})

"""Real workers, real swaps: every trained token has the logprob of the weights that it claims.

It finds wrong offsets, masks, temperatures, version stamps and caches that outlive a swap. The weights move far at
every step, and answers are long enough that swaps come in their middle.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.forked_roles import recorded_trainer, role
from support.recorded_run import recompute_all
from support.waiting import PATIENCE_S

STEPS = 3
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
EDITS = {
    "batch_groups = 16": "batch_groups = 4",
    "max_tokens = 8": "max_tokens = 40",
    'judge = "exact_match"': 'judge = "parity_judge.reward"\nrows.max_prompt_tokens = 64\n'
    'staleness.stragglers = "expire"',  # batches that wait for nobody: the next weights come in the middle of answers
    "temperature = 1.0": "temperature = 0.7",
    # A batch then takes many rounds, so that it outlasts a train step, however slow the machine is.
    "[worker.options]": "[worker.options]\nmax_batch = 4",
    "steps = 150": f"steps = {STEPS}",
    # Far higher than one would choose, so that versions differ; twice of it would be stopped for its mismatch at times.
    "learning_rate = 0.0005": "learning_rate = 0.005",
}


@pytest.fixture
def prepared(prepared_demo: Path, tmp_path: Path) -> Path:
    """A demo's folder with a model that knows nothing, and a judge that rewards what can be learnt from anything."""
    folder = shutil.copytree(prepared_demo, tmp_path / "demo")
    config = folder / "rollq.toml"
    text = config.read_text("utf-8")
    for old, new in EDITS.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    config.write_text(text, "utf-8")
    (folder / "parity_judge.py").write_text(JUDGE, "utf-8")
    return folder


@pytest.mark.long
def test_every_token_that_real_workers_made_has_the_logprob_of_the_weights_that_it_claims(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        roles.enter_context(role(prepared, "produce", "rollq.toml"))
        for name in ("one", "two"):
            roles.enter_context(role(prepared, "work", "rollq.toml", "--name", name))
        trainer = roles.enter_context(recorded_trainer(prepared))
        trainer.join(PATIENCE_S)
        assert trainer.exitcode == 0, (prepared / "train-rollq.toml.log").read_text()

    assert len(list((prepared / "record" / "batches").iterdir())) == STEPS
    seen = recompute_all(prepared / "record", tolerance=1e-4)
    assert seen.ages == {0, 1}
    assert seen.mixed > 0, "no swap came in the middle of an answer"

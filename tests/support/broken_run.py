"""A run with real processes, to be broken on purpose."""

from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

from click.testing import CliRunner

from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from support.forked_roles import role
from support.forks import FORKS
from support.loop_trainer import STEP_S, train
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import wait_until

JUDGE = "def judge(prompt, sample):\n    raise KeyError('answer of ' + str(prompt.content)[:3])\n"
ENGINE = "lengths = [3, 5], tokens_per_s = 500.0"


class BrokenRun:
    """A run in `folder`. Its trainer is a custom loop, its engines are simulated."""

    def __init__(self, folder: Path, server: EmbeddedServer, run: str, roles: ExitStack) -> None:
        self.folder = folder
        self._server, self._run, self._roles = server, run, roles
        (folder / "p.jsonl").write_text("".join(f'{{"prompt": "p{row}", "answer": "1"}}\n' for row in range(50)))
        (folder / "broken_judge.py").write_text(JUDGE)
        tiny_qwen3().save_pretrained(folder / "model")
        self.write()

    def write(self, judge: str = "", task: str = "", engine: str = ENGINE, tables: str = "") -> None:
        """Write the settings, with a user-written judge if one is named. `task` and `tables` add to the file."""
        (self.folder / "rollq.toml").write_text(
            f'run = "{self._run}"\n[redis]\nbuffer_url = "{self._server.url}"\n[tasks.math]\nprompts = "p.jsonl"\n'
            + (f'judge = "{judge}"\n' if judge else "")
            + f"batch_groups = 4\ngroup_size = 2\n{task}"
            + f'[worker]\nengine = "simulated"\ngrace_s = 1.0\noptions = {{ {engine} }}\n{tables}'
        )

    def start(self, *names: str) -> None:
        """Start roles by their commands."""
        for name in names:
            self._roles.enter_context(role(self.folder, name, "rollq.toml"))

    def train(self, steps: int = 100_000, step_s: float = STEP_S) -> BaseProcess:
        """Start the trainer, once the producer has registered the task."""
        self.until("starting: no trainer has started")
        given = (self._server.url, self._run, self.folder / "model", steps, step_s)
        trainer = FORKS.Process(target=train, args=given)
        trainer.start()
        self._roles.callback(trainer.join)
        self._roles.callback(trainer.kill)
        return trainer

    def rollq(self, *arguments: str) -> str:
        """What a command prints."""
        return CliRunner().invoke(main, [*arguments, str(self.folder / "rollq.toml")]).output

    def until(self, *words: str) -> str:
        """Wait until `rollq status` begins with a diagnosis that has these words, and return it."""
        seen = ""

        def shown() -> bool:
            nonlocal seen
            seen = " ".join(self.rollq("status").partition("\n\n")[0].split())
            return all(word in seen for word in words)

        wait_until(shown, otherwise=lambda: seen)
        return seen

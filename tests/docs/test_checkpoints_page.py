from pathlib import Path
from typing import get_args

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.snapshots.folder import INDEX
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.buffer_run import World
from support.documented_commands import ROOT, Desk, blocks

PAGE = ROOT / "docs" / "guide" / "checkpoints.md"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, 6379)


@pytest.mark.long
def test_every_command_of_the_page_runs(
    desk: Desk, run_name: str, server: EmbeddedServer, fresh_server: EmbeddedServer
) -> None:
    (desk.folder / "p.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = desk.folder / "rollq.toml"
    config.write_text(
        f'run = "{run_name}"\n[redis]\nbuffer_url = "{server.url}"\n'
        '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    )

    with Buffer.connect(server.url, run_name) as buffer:
        world = World(buffer).start(math={"group_size": 8})
        world.complete(4)
        world.train(1)
        save, restore, move, fork = [
            block.code.replace("redis://10.0.0.2:6379", fresh_server.url)
            for block in blocks(PAGE)
            if block.language == "bash"
        ]
        assert "saved 4 groups" in desk.run(save)
        assert (desk.folder / "backups" / "step-20" / INDEX).exists()
        moved = desk.run(move)
        assert "now start the trainer from its checkpoint of step 1" in moved
        assert "restored 4 groups" in desk.run(fork)
    with Buffer.connect(fresh_server.url, run_name) as there:
        assert World(there).statuses() == {"completed": 2, "archived": 2}
        there.client.flushdb()
    config.write_text(config.read_text("utf-8").replace(server.url, fresh_server.url))
    assert "restored 4 groups" in desk.run(restore)


def test_the_page_tells_what_every_resume_mode_does() -> None:
    assert all(f"\n| `{mode}` |" in PAGE.read_text("utf-8") for mode in get_args(ResumeMode))

"""No function works on more than about a thousand groups in one call, however full the buffer is."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.exclusion import MOST_EXCLUDED_ROWS
from rollq.buffer.calls.orders import GroupOrder, Order
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.prompts import UnusableRow
from rollq.buffer.errors import RollqError
from rollq.buffer.store import library
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_functions import Call
from rollq.buffer.values.history import HISTORY_ROWS
from rollq.buffer.values.rollouts import Lease, Prompt, Status
from support.buffer_run import World
from support.function_names import FUNCTION_NAMES
from support.late_copies import name_of

FULL = 100_000
MOST = 100_000
"""Values that one call may read or write: a batch of 1,000 groups with 100 values each."""
READ_WHOLE_SETS = {"find", "save_index"}
"""For queries and snapshots, which must see one instant: about 5 ms for each 10,000 groups."""
OF_ARGUMENTS = {
    "create_run", "restore_run", "restore_groups", "restore_task", "finish_restore", "store_weights", "append_round",
    "find_orphans", "find_garbage", "forget_garbage", "mark", "put", "record", "renew", "salvage", "hand_back",
    "end_finalize", "begin_delete", "drop_too_long", "insert", "offer", "end_loan",
}  # fmt: skip
"""Functions whose work depends on their arguments alone."""
COUNTING = """
local touched = 0
local function counted(...)
  local reply = redis.call(...)
  touched = touched + select('#', ...) + (type(reply) == 'table' and #reply or 1)
  return reply
end
"""
TALLY = """
redis.register_function('touched', function()
  local before = touched
  touched = 0
  return before
end)
"""
FILL = """
for id = ARGV[1], ARGV[2] do
  redis.call('HSET', ARGV[3] .. id, 'status', 'completed', 'arrival', id, 'attempt', 1, 'tries', 1, 'deaths', 1,
    'step', 1, 'eval', 0, 'letters', 'cc', 'versions', '0,0', 'oldest', 0, 'newest', 0, 'reward', 1, 'tokens', 6,
    'nonce', 'n', 'alone', 0, 'confirmed', 1, 'counted_in', 1, 'batch', 'full', 'prompt', '',
    'offered', '0,1', 'worker', 'v')
end
"""


class CountingBuffer(Buffer):
    """Keeps the most values that each function has touched in one call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.most: dict[str, int] = {}

    def call(self, name: str, key: str, *args: Any) -> Any:
        try:
            return super().call(name, key, *args)
        finally:
            self._note(name)

    def call_each(self, calls: Callable[[], Iterable[Call]]) -> list[Any]:
        replies: list[Any] = []
        for call in calls():
            replies += super().call_each(partial(list, [call]))
            self._note(name_of(call))
        return replies

    def _note(self, name: str) -> None:
        touched: Any = self.client.fcall("touched", 0)
        self.most[name] = max(self.most.get(name, 0), int(touched))


@pytest.fixture
def counting(fresh_server: EmbeddedServer) -> Iterator[CountingBuffer]:
    with CountingBuffer.connect(fresh_server.url, "full") as buffer:
        source = library.library_source().replace("redis.call(", "counted(").replace("\n", f"\n{COUNTING}", 1)
        client: Any = buffer.client
        client.function_load(
            source.replace("  local reply = counted(...)", "  local reply = redis.call(...)") + TALLY, replace=True
        )
        yield buffer


def fill(buffer: Buffer, task: str = "math") -> None:
    """Every structure of a task, with the same groups in all of them."""
    client: Any = buffer.client
    keys = task_keys(buffer.run, task)
    prefix = keys.clock.removesuffix("clock")
    for start in range(1, FULL, 5000):
        client.eval(FILL, 0, start, start + 4999, f"{prefix}group:")
    ids = range(1, FULL + 1)
    client.zadd(prefix + "by_version", {str(group_id): 1.0 for group_id in ids})
    for name in (*(status.value for status in Status), "suspects", "generating", "offers"):
        client.copy(prefix + "by_version", prefix + name, replace=True)
    client.rpush(prefix + "history", *[",".join(["1"] * 30)] * 2 * HISTORY_ROWS)
    for name in ("outcomes", "timings"):
        client.rpush(prefix + name, *[1] * 1000)
    client.rpush(keys.batch_groups("full"), *ids)
    client.hset(keys.progress, "admitted", FULL)
    client.hset(prefix + "prompts", mapping={str(row): "1,1,1,1,1" for row in ids})


def everything(world: World) -> Iterator[Callable[[], Any]]:
    """Every call, each on its own: what it finds is no sensible run."""
    buffer, held, prompts = world.buffer, world.held, [Prompt("a prompt")] * 500
    rows = [(prompt, at) for at, prompt in enumerate(prompts, start=1)]
    unusable = [UnusableRow(row, f"reason {row}", "prompts.jsonl:1") for row in range(500)]
    yield lambda: buffer.admit("math", rows, epoch=1, cursor=0, target=10**9, step=1)
    yield lambda: buffer.record_prompts("math", "digest", FULL, "", "prompts.jsonl")
    yield lambda: buffer.account_rows("math", "a", rows=FULL, passed=FULL, unusable=unusable)
    yield lambda: buffer.recycle("math", epoch=1, target=10**9, limit=10**6)
    yield lambda: buffer.lease(["math"], 64, worker="w", version=0, epoch=1)
    yield lambda: buffer.lease(["math"], 64, worker="w", version=0, epoch=1, suspects_held=10**6, idle=False)
    yield lambda: buffer.borrow("math", 64, worker="w", version=9, epoch=1, share=1.0)
    yield lambda: world.run_out([Lease("math", 1, 1, "n", 1, Prompt("p"), (), 1, False, False, False, False)])
    yield lambda: buffer.reap("math")
    yield lambda: buffer.publish(held, 9, uri="u", digest="9")
    yield lambda: buffer.expire("math")
    yield lambda: buffer.readiness("math", 10)
    yield lambda: buffer.preview(10, {"math": 1000})
    yield lambda: buffer.counts("math")
    yield lambda: buffer.overview("math")
    yield lambda: buffer.inspect("math", 1)
    yield lambda: buffer.claim(held, 1, {"math": 1000})
    yield lambda: buffer.divide(held, Claimed(1, (), (), 0, 0, {"math": 1}))
    yield lambda: buffer.release(held, 1, "return", claim_round=0)
    yield lambda: buffer.claim(held, 1, {"math": 1000})
    yield lambda: buffer.commit(held, 1)
    yield lambda: buffer.checkpoint(held, 1)
    yield lambda: buffer.take_production("math")
    yield lambda: buffer.set_control("math", buffer.clock("math").control)
    yield lambda: buffer.change_rules("math", {"max_tries": 4})
    yield lambda: buffer.exclude_rows("math", range(MOST_EXCLUDED_ROWS))
    yield lambda: buffer.call_task("discard_task", "math")
    yield lambda: buffer.sleep(held, "a step")
    yield lambda: buffer.sleep(held, "")
    yield lambda: buffer.report_worker("w", {"state": "busy"})
    yield lambda: buffer.join_fleet("w", 8, load=4.0, tokens_per_s=100.0)
    yield lambda: buffer.order_worker("w", Order.PAUSE)
    yield lambda: buffer.forget_worker("w")
    yield lambda: buffer.order_group("math", 1, GroupOrder.REQUEUE)
    yield lambda: buffer.order_group("math", 2, GroupOrder.QUARANTINE)
    yield lambda: buffer.order_group("math", 3, GroupOrder.DROP)
    yield lambda: buffer.renew_trainer(held)
    yield lambda: buffer.report_trainer(held, {"step": 1})
    batch = buffer.open_batch("math", "new", "train", step=1)
    yield lambda: buffer.fill_batch("math", batch.handle, 0, prompts, last=True)
    yield lambda: buffer.begin_finalize("math", batch.handle, "mine", lease_s=60)
    yield lambda: buffer.undo_finalize("math", batch.handle, "mine")
    yield lambda: buffer.cut_off("math", batch.handle)
    yield lambda: buffer.call_task("close_evaluation", "math", "full", 500, b"{}")
    yield lambda: buffer.abort_batch("math", "full", "for the test")
    yield lambda: buffer.call_task("find", "math", "completed", "-inf", "+inf")
    yield lambda: buffer.call_task("claim", "math", held.epoch, held.nonce, 2, 1000, 0, 0, 1000, 0, 0, 0, 1 << 18)
    yield lambda: buffer.prioritize(held, "math", dict.fromkeys(range(1, 1001), 2.0))
    yield lambda: buffer.call_task("hold_for_saving", "math", "a save", 0)
    yield lambda: buffer.call_task("save_index", "math", *(status.value for status in Status))
    yield lambda: buffer.call_task("save_group", "math", 1)
    yield lambda: buffer.leave_audit("math")
    yield lambda: take_and_forget(buffer)
    yield lambda: world.begin(1, mode="return", launch_id="second")


def take_and_forget(buffer: Buffer) -> None:
    portion = buffer.take_to_archive("math", "archiver", most=10**6, wait_s=0)
    assert portion is not None
    buffer.forget_archived(portion)


@pytest.mark.long
def test_a_call_touches_a_bounded_number_of_values_in_a_full_buffer(counting: CountingBuffer) -> None:
    rules: dict[str, object] = {"batch_groups": 1000, "max_staleness": 20, "max_uses": 3, "max_deaths": 3}
    world = World(counting).start(math=rules)
    client: Any = counting.client
    keys = task_keys("full", "math")
    client.hset(keys.batch("full"), mapping={"id": "full", "state": "running", "type": "train", "size": FULL})
    client.hset(keys.batches, "full", "full")
    fill(counting)
    for act in everything(world):
        with suppress(RollqError, redis.ResponseError):
            act()
    assert counting.most.keys() >= FUNCTION_NAMES - OF_ARGUMENTS, FUNCTION_NAMES - OF_ARGUMENTS - counting.most.keys()
    beyond = {name: touched for name, touched in counting.most.items() if touched > MOST}
    assert beyond.keys() <= READ_WHOLE_SETS, beyond


def test_steps_that_a_store_never_saw_cost_nothing(counting: CountingBuffer, tmp_path: Path) -> None:
    step = 900_001
    world = World(counting).start()
    world.begin(step, launch_id="with a checkpoint of another store")
    counting.checkpoint(world.held, step)
    counting.save(tmp_path / "saved")
    world.begin(step, launch_id="again")
    assert max(counting.most.values()) < 500, counting.most


def test_many_epochs_cost_no_more_than_a_few(counting: CountingBuffer) -> None:
    world = World(counting).start(math={"max_staleness": 2})
    for launch in range(200):
        world.begin(0, launch_id=f"launch {launch}")
    client: Any = counting.client
    assert client.hlen(task_keys("full", "math").clock) < 80
    assert client.hlen(counting.keys.versions) == 1
    assert max(counting.most.values()) < 500, counting.most

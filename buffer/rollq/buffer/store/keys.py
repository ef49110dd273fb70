"""Every key that rollq owns: name, type, content, writer, lifetime. Nothing else in Python builds a key name.

A run's keys share the hash tag `{run}`, and a task's keys share `{run:task}`, so that a function finds all keys that it
touches in one slot. The functions also build a group's own keys, with `group_key`, `rollout_key` and `payload_key` in
`lua/common/samples.lua`; a test checks that both spellings agree.

key                              type    content                                       writer     lifetime
rollq:{run}:run                  hash    incarnation, schema, fingerprints             admin      run
rollq:{run}:tasks                set     task names                                    admin      run
rollq:{run}:model_version        string  the live version, for display                 trainer    run
rollq:{run}:model                hash    epoch, version, digest, uri, published_ms     trainer    run
rollq:{run}:versions             hash    version -> digest of the weights last published trainer   until checkpoint
rollq:{run}:published            hash    version -> since which epoch, digest of its weights functions until checkpoint
rollq:{run}:trainer              hash    epoch, nonce, who and where, lease, report    trainer    run
rollq:{run}:curves               zset    step -> its numbers, and when (JSON)           trainer    thinned to 5,000
rollq:{run}:evaluations          zset    step -> rewards of its evaluations, likewise      trainer    likewise
rollq:{run}:launches             zset    launches that were replaced, by their epoch   functions  the last 1,000
rollq:{run}:workers              hash    worker -> its last report (JSON)              worker     pruned after 1 h
rollq:{run}:orders               hash    worker -> number and the operator's order      functions  with its report
rollq:{run}:fleet                hash    worker -> places, speed; "+" -> sums of all     functions  pruned after 10 s
rollq:{run}:fleet_seen           zset    the same workers by their last report (ms)    functions  likewise
rollq:{run}:reported_state       string  state that watchers have reported last, nonce monitor    30 days
rollq:{run}:plan:<step>          hash    sizes per task of a step's claim              trainer    until checkpoint
rollq:{run}:weights              list    names of the weights held here, oldest first  trainer   run
rollq:{run}:weights:<digest>:<n> string  manifest (0), bytes, probe, chain; deltas     trainer    last few versions
rollq:{run}:rounds               string  number of weight broadcasts so far             functions  run
rollq:{run}:round:<n>            stream  who takes part in one, entry by entry         functions  1 day
rollq:{run}:events:<kind>        channel wake-ups of a kind; the message is the task   all        -
rollq:{run}:run:absent           none    never exists: see `with_all_keys` in Lua          nobody       -
rollq:{run}:mark                 string  nothing: written before WAIT, on a cluster    all        run
rollq:{run:task}:mark            string  likewise                                      all        run
rollq:{run:task}:clock           hash    what the task's functions check               all        run
rollq:{run:task}:clock:absent    none    never exists: see `with_all_keys` in Lua          nobody       -
rollq:{run:task}:rules           hash    revision -> changes; file, seen:<digest>       functions  the last 100
rollq:{run:task}:progress        hash    cursor and cumulative counters                functions  run
rollq:{run:task}:<status>        zset    group ids                                     functions  run
rollq:{run:task}:by_version      zset    completed + aborted by oldest version, arrival functions  run
rollq:{run:task}:suspects        zset    pending groups that workers died with         functions  run
rollq:{run:task}:generating      zset    running groups by the version they began with   functions  run
rollq:{run:task}:offers          zset    running groups that offer samples to workers  functions  run
rollq:{run:task}:outcomes        list    1 kept, 0 not: the last finished groups       functions  run
rollq:{run:task}:last_error      hash    text and time of the newest error             functions  run
rollq:{run:task}:window          hash    sums since they were last taken               functions  run
rollq:{run:task}:timings         list    ms per group since they were last taken       functions  run
rollq:{run:task}:prompt_file     hash    digest, rows, path of the prompts; their seeds functions  run
rollq:{run:task}:excluded        hash    row that was taken out -> digest of its prompts  functions  run
rollq:{run:task}:producers       hash    where a producer is -> when it looked at the task  functions  until silent
rollq:{run:task}:history         list    depths and counters, a row every 10 s           functions  1 day
rollq:{run:task}:too_long        hash    row of a prompt that is too long -> its tokens  functions  run
rollq:{run:task}:unusable        hash    why rows of prompts are unusable -> how many, first functions  run
rollq:{run:task}:unusable_rows   hash    row of a prompt that is unusable -> nothing    functions  run
rollq:{run:task}:sources         hash    source of groups that were inserted -> how many  functions  run
rollq:{run:task}:prompts         hash    row -> statistics of its prompt, as text      functions  run
rollq:{run:task}:batches         hash    batch id -> handle                            functions  200 more are over
rollq:{run:task}:batches_over    list    handles of those that are over, oldest first  functions  run
rollq:{run:task}:batch:<handle>  hash    one batch: state, type, step, size, counts    functions  200 more are over
rollq:{run:task}:batch:<handle>:groups list its group ids                              functions  it is over
rollq:{run:task}:group:<id>      hash    one group's numbers, error, prompt, history   functions  until dropped
rollq:{run:task}:rollout:<id>    hash    "all" -> frame; or sample index, parts       functions  until dropped
rollq:{run:task}:payload:<id>:<nonce> string a frame that is too large for a function functions until dropped
rollq:{run:task:<id>}:payload:<name> string likewise, external, on a cluster           workers    until collected
rollq:{run:task}:garbage         set     external payloads that no group needs         functions  until collected
rollq:{run:task}:shared          hash    external payload -> how many groups name it   functions  until dropped
rollq:{run:task}:archive         hash    who archives, the open portion, groups so far functions  run
rollq:{run:task}:grant:<nonce>   string  ids of one lease call, for its retry          functions  one lease
rollq:{run:task}:manifest:<step> hash    the batch of a step, cumulative counters      functions  until checkpoint
"""

from dataclasses import dataclass
from functools import lru_cache

from rollq.buffer.rules.names import check_name
from rollq.buffer.values.rollouts import Status

SCHEMA_VERSION = 10
"""Version of what a run stores: keys, fields, frames and messages. Releases with the same version may work in one run.
Increase it if the last release's roles could not work with data that this release stores, or the reverse. All releases
with one schema change a clock's `revision` when they write the clock: servers cache the clocks that they read.
"""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run."""

    run: str

    def __post_init__(self) -> None:
        check_name("run", self.run)

    def _key(self, leaf: str) -> str:
        return f"rollq:{{{self.run}}}:{leaf}"

    @property
    def info(self) -> str:
        return self._key("run")

    @property
    def tasks(self) -> str:
        return self._key("tasks")

    @property
    def model(self) -> str:
        return self._key("model")

    @property
    def model_version(self) -> str:
        return self._key("model_version")

    @property
    def versions(self) -> str:
        return self._key("versions")

    @property
    def published(self) -> str:
        return self._key("published")

    @property
    def trainer(self) -> str:
        return self._key("trainer")

    @property
    def curves(self) -> str:
        return self._key("curves")

    @property
    def evaluations(self) -> str:
        return self._key("evaluations")

    @property
    def launches(self) -> str:
        return self._key("launches")

    @property
    def workers(self) -> str:
        return self._key("workers")

    @property
    def reported_state(self) -> str:
        return self._key("reported_state")

    @property
    def orders(self) -> str:
        return self._key("orders")

    @property
    def events(self) -> str:
        return self._key("events")

    def plan(self, step: int) -> str:
        return self._key(f"plan:{step}")

    @property
    def weights_held(self) -> str:
        return self._key("weights")

    def weights(self, digest: str, part: int) -> str:
        """A key named by content: the weights that open an epoch are stored before the epoch has a number."""
        return self._key(f"weights:{digest}:{part}")

    def round(self, number: int) -> str:
        return self._key(f"round:{number}")

    def queue(self, pool: str | None = None) -> str:
        """Name of the RQ ticket queue (RQ adds the prefix `rq:queue:`)."""
        return f"rollq-{self.run}" if pool is None else f"rollq-{self.run}-{check_name('pool', pool)}"


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """Keys of one task of one run."""

    run: str
    task: str

    def __post_init__(self) -> None:
        check_name("run", self.run)
        check_name("task", self.task)

    def _key(self, leaf: str) -> str:
        return f"rollq:{{{self.run}:{self.task}}}:{leaf}"

    @property
    def prefix(self) -> str:
        return self._key("")

    @property
    def clock(self) -> str:
        return self._key("clock")

    @property
    def rules(self) -> str:
        return self._key("rules")

    @property
    def progress(self) -> str:
        return self._key("progress")

    @property
    def by_version(self) -> str:
        return self._key("by_version")

    @property
    def generating(self) -> str:
        return self._key("generating")

    @property
    def suspects(self) -> str:
        return self._key("suspects")

    @property
    def offers(self) -> str:
        return self._key("offers")

    def status(self, status: Status) -> str:
        return self._key(status.value)

    def group(self, group_id: int) -> str:
        return self._key(f"group:{group_id}")

    def rollout(self, group_id: int) -> str:
        return self._key(f"rollout:{group_id}")

    def payload(self, group_id: int, nonce: str) -> str:
        """The key of a payload in the task's slot."""
        return self._key(f"payload:{group_id}:{nonce}")

    def payload_away(self, group_id: int, name: str) -> str:
        """The key of a payload in the group's slot."""
        return f"rollq:{{{self.run}:{self.task}:{group_id}}}:payload:{name}"

    @property
    def archive(self) -> str:
        return self._key("archive")

    @property
    def prompts(self) -> str:
        return self._key("prompts")

    @property
    def sources(self) -> str:
        return self._key("sources")

    @property
    def excluded(self) -> str:
        return self._key("excluded")

    @property
    def prompt_file(self) -> str:
        return self._key("prompt_file")

    @property
    def producers(self) -> str:
        return self._key("producers")

    @property
    def too_long(self) -> str:
        return self._key("too_long")

    @property
    def unusable(self) -> str:
        return self._key("unusable")

    @property
    def batches(self) -> str:
        return self._key("batches")

    def batch(self, handle: str) -> str:
        return self._key(f"batch:{handle}")

    def batch_groups(self, handle: str) -> str:
        return self._key(f"batch:{handle}:groups")

    def manifest(self, step: int) -> str:
        return self._key(f"manifest:{step}")


@lru_cache(maxsize=1024)
def task_keys(run: str, task: str) -> TaskKeys:
    """A task's keys, checked and built once."""
    return TaskKeys(run, task)

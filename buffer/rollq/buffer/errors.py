"""The errors of rollq, one tree.

RollqError
 |- ConfigError          a setting, file or argument that makes no sense; says which and what is allowed
 |   |- QueryError           a query that cannot be understood; names the field, operator or value
 |- InvalidPrompt        a prompt line that cannot be used; names file and line
 |- InvalidGroup         a result that cannot be trained on; names the field and the sample
 |- CorruptFrame         bytes from Redis that fail their checksum or schema version
 |   |- CorruptGroup        a claimed group that holds such bytes: its batch cannot be read
 |- ServerError          the server cannot serve rollq
 |   |- ServerUnavailable   nobody answers at the URL, or not in time
 |   |- ServerRefused       wrong password, missing right, eviction policy, out of memory, read only
 |- StoreLost            the run is not in this store (any more): it was flushed, restarted empty, or is another one
 |- RunMismatch          the run exists with another model, tokenizer, schema or task settings
 |- FencedError          the caller has been replaced: its epoch, attempt or nonce is old
 |   |- TrainerHeld         another live trainer holds the run
 |- StaleWorker          the worker's weights would already be too old at the next step
 |- HistoryGone          the batches that a resume needs are no longer kept
 |- CheckpointOverdue    too many batches are held for a checkpoint that does not come
 |- ClaimTimeout         a batch did not fill in time; says what holds it back
 |- SnapshotError        a saved buffer that is missing, damaged or of another schema; names the file
 |- WeightsError         weights that are missing, truncated or not the ones announced
"""


class RollqError(Exception):
    """Base of every error that rollq raises on purpose."""


class ConfigError(RollqError, ValueError):
    """A setting, file or argument that makes no sense."""


class QueryError(ConfigError):
    """A query that cannot be understood."""


class InvalidPrompt(RollqError, ValueError):
    """A prompt line that cannot be used."""


class InvalidGroup(RollqError, ValueError):
    """A generation result that cannot be trained on."""


class CorruptFrame(RollqError, ValueError):
    """Bytes that are not a frame of a known schema version, or fail their checksum."""


class CorruptGroup(CorruptFrame):
    """A claimed group that cannot be read."""

    def __init__(self, task: str, group_id: int, problem: str) -> None:
        super().__init__(f"group {group_id} of task {task!r}: {problem}")
        self.task = task
        self.group_id = group_id


class ServerError(RollqError):
    """The Redis server cannot serve rollq."""


class ServerUnavailable(ServerError, ConnectionError):
    """Nobody answers at the URL, or not in time."""


class ServerRefused(ServerError):
    """The server answers, but refuses: password, rights, eviction policy, memory, role."""


class StoreLost(RollqError):
    """The store no longer holds this run, or holds another incarnation of it."""


class RunMismatch(RollqError):
    """The run exists, but with another model, tokenizer, schema or task settings."""


class FencedError(RollqError):
    """The caller was replaced: a newer trainer, attempt or nonce exists."""


class TrainerHeld(FencedError):
    """Another live trainer holds the run."""


class StaleWorker(RollqError):
    """The worker's weights would already be too old at the next step."""


class HistoryGone(RollqError):
    """The batches that a resume needs are no longer kept."""


class CheckpointOverdue(RollqError):
    """Too many batches are held for a checkpoint that does not come."""


class SyncFirst(RollqError):
    """The live weights are too old for the step, and newer ones exist: publish them, then ask for the step again."""


class ProductionStalled(RollqError):
    """No batch of the step fills: nothing is under way, and a full server admits nothing. Holds every counter."""


class ProductionStopped(RollqError):
    """Production of a task was stopped, because too little of it is worth training."""


class ClaimTimeout(RollqError, TimeoutError):
    """A batch did not fill in time."""


class ArrayError(RollqError):
    """A named array beside Redis that is missing, changed, or cannot be written."""


class SnapshotError(RollqError):
    """A saved buffer that cannot be written or restored: missing, damaged, or of another schema."""


class WeightsError(RollqError):
    """Weights that are missing, truncated, or not the ones that were announced."""

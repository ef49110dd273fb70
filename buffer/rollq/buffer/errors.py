"""Every error that rollq raises on purpose, as one tree.

RollqError
 |- ConfigError          a setting, file or argument is invalid; names it and the allowed values
 |   |- QueryError           a query is malformed; names the field, operator or value
 |- InvalidPrompt        a prompt is malformed; names the field, or the file and line
 |   |- AllExcluded         all usable rows of a task are excluded
 |- InvalidGroup         a result cannot be trained on; names the field and the sample
 |- CorruptFrame         bytes from Redis fail their checksum or have an unknown schema version
 |   |- CorruptGroup        a claimed group contains such bytes, so its batch cannot be read
 |- ServerError          the Redis server cannot serve rollq
 |   |- ServerUnavailable   no server answers at the URL in time
 |   |   |- PortTaken           the port that an embedded server should listen on is in use
 |   |- ServerRefused       the server refuses: password, rights, eviction policy, memory, read only
 |- StoreLost            the store was flushed or replaced and no longer holds this run
 |- RunMismatch          the run exists with another model, tokenizer, schema or task rules
 |- FencedError          a newer trainer, attempt or nonce has replaced the caller
 |   |- TrainerHeld         another live trainer holds the run
 |   |- NotClaimed          a step cannot be committed unclaimed, or released once committed
 |   |- VersionFalls        weights to publish are older than the live weights, or differ under the same version
 |- TaskBehind           a task was registered while the trainer's epoch started, and lacks it
 |- EpochMoved           a result counted its versions by an epoch that has ended
 |- BatchRefused         a batch of groups cannot be opened under this name or in this task
 |- BatchOver            a batch of groups is finalized, aborted or unknown
 |- UnknownBatch         a batch of groups was never submitted, or ended long ago
 |- StaleWorker          a worker's weights would already be too old at the next step
 |- HistoryGone          the batches that a resume needs are no longer kept
 |- ReplayMismatch       recorded batches came from weights other than those that would train on them
 |- CheckpointOverdue    too many batches wait for a checkpoint
 |- SyncFirst            newer weights must be published before the step can be trained
 |- ProductionStalled    no batch can fill, because the server is full or nothing is under way
 |- ProductionStopped    production of a task was stopped: its groups all fail, or too few are worth training
 |- ClaimTimeout         a batch did not fill or finish in time; says what holds it back
 |- TicketRefused        a job in the queue is not a ticket of this run
 |- ArrayError           a named array outside Redis is missing, changed, or cannot be written
 |- ImageError           an image of a prompt cannot be read, has changed, or does not fit the model
 |- ArchiveError         an archive does not hold what a caller asks for
 |- SnapshotError        a saved buffer is missing or damaged, or has another version; names the file
 |- WeightsError         weights are missing, truncated or not the announced weights
 |   |- TooLate             a weight broadcast started without this worker
 |   |- WeightsRejected     an engine has loaded weights, and returns the wrong logprobs with them
 |   |   |- WeightsLate     servers that others load weights into do not serve the published weights yet
 |- SampleFailed         one sample has failed, at a part that has a kind
 |   |- ContextFull         a prompt and its prefix leave no room for a token
 |   |- RequestRefused      the engine refuses a request, which can never work
 |   |- ToolError           a tool failed; names it and the reason
 |   |- ToolLost            a tool is gone, with the state that its sample had in it
 |- EngineDead           the inference engine died; the worker restarts it or exits
 |- TransientError       an inference server failed for a reason that may pass
 |   |- Unanswered          a server did not answer in time
 |   |- WrongWeights        a server returns logprobs that differ from its weights'
 |- RequestFailed        a request to the engine's servers failed at every try
 |- RecordsFull          the buffer has no room for another call of a group by an agent over HTTP
 |- JudgeFailed          a judge in a separate process ended without a reward
 |- CallsHang            as many calls of a user's function hang as may run at the same time
 |- GroupNotJudged       a judge of whole groups ended without rewards
 |- ConnectionLost       a connection to an MCP server is lost, with the state that the server kept for it
 |   |- ServerNotThere      an MCP server does not answer, or cannot be started
 |- FilterError          a filter failed; names it and the reason
 |- CallError            the model called a tool incorrectly; the message answers the model
 |- RoleFailed           a role died too often to restart it again
 |- NothingLearned       a demo has trained all its steps, and its model answers no better than before

`SampleFailed` is defined in `rollq.buffer.values.failures`; its children, `TooLate`, `WeightsRejected`, `WeightsLate`
and the errors from `EngineDead` to `CallError` in `rollq.workers`; `AllExcluded` in `rollq.producer`; `RoleFailed` and
`NothingLearned` in `rollq.cli`. All others are defined here.
"""


class RollqError(Exception):
    """Base of every error that rollq raises on purpose."""


class ConfigError(RollqError, ValueError):
    """A setting, file or argument is invalid. The message names the culprit and the allowed values."""


class QueryError(ConfigError):
    """A query over the buffer is malformed. The message names the field, operator or value."""


class InvalidPrompt(RollqError, ValueError):
    """A prompt is malformed. The message names the field, or the file and line."""


class InvalidGroup(RollqError, ValueError):
    """A generated group cannot be trained on. The message names the field and the sample."""


class CorruptFrame(RollqError, ValueError):
    """Bytes read from Redis fail their checksum or have an unknown schema version."""


class CorruptGroup(CorruptFrame):
    """A claimed group contains corrupt bytes, so its batch cannot be read. `task` and `group_id` name the group."""

    def __init__(self, task: str, group_id: int, problem: str) -> None:
        super().__init__(f"group {group_id} of task {task!r}: {problem}")
        self.task = task
        self.group_id = group_id


class ServerError(RollqError):
    """The Redis server cannot serve rollq."""


class ServerUnavailable(ServerError, ConnectionError):
    """No Redis server answers at the URL in time."""


class PortTaken(ServerUnavailable):
    """The port that an embedded server should listen on is in use."""


class ServerRefused(ServerError):
    """The Redis server answers, but refuses: password, rights, eviction policy, memory, or it is read only."""


class StoreLost(RollqError):
    """The store no longer holds this run, or holds another incarnation of the run."""


class RunMismatch(RollqError):
    """The run exists with another model, tokenizer, schema or task rules."""


class FencedError(RollqError):
    """A newer trainer, attempt or nonce has replaced the caller."""


class TrainerHeld(FencedError):
    """Another live trainer holds the run."""


class NotClaimed(FencedError):
    """A step that is not claimed cannot be committed or checkpointed, and a committed step cannot be released."""


class VersionFalls(FencedError):
    """Weights to publish are older than the live weights, or differ under the same version."""


class TaskBehind(RollqError):
    """A task that was registered while the trainer's epoch started lacks that epoch. The trainer's calls correct it."""


class EpochMoved(RollqError):
    """A result counted its versions by an epoch that has ended. Counted by the live epoch, it is accepted."""


class BatchRefused(RollqError, ValueError):
    """A batch of groups cannot be opened under this name, in this task or with this content, or has another type."""


class BatchOver(RollqError):
    """The batch of groups is finalized or aborted, or never existed."""


class UnknownBatch(RollqError, KeyError):
    """A batch of groups was never submitted, or its record has expired since it ended."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError shows the repr


class StaleWorker(RollqError):
    """The worker's weights would already be too old at the next train step."""


class HistoryGone(RollqError):
    """The batches that a resume needs are no longer kept."""


class ReplayMismatch(RollqError):
    """Recorded batches would be replayed to weights that did not generate them, which the settings forbid."""


class CheckpointOverdue(RollqError):
    """Too many trained batches wait for a checkpoint, so no further batch can be claimed."""


class SyncFirst(RollqError):
    """The live weights are too old for the step, but newer weights exist: publish these, then claim the step again."""


class ProductionStalled(RollqError):
    """The step's batch cannot fill: nothing is under way, or the server is full. The message has all counters."""


class ProductionStopped(RollqError):
    """A task's production was stopped: all its groups fail, or too few are worth training."""


class ClaimTimeout(RollqError, TimeoutError):
    """A batch did not fill or finish in time. The message says what holds the batch back."""


class TicketRefused(RollqError, ValueError):
    """A job in the queue is not a ticket for this run. Such jobs are never executed."""


class ArrayError(RollqError):
    """A named array outside Redis is missing, changed, or cannot be written."""


class ImageError(RollqError, ValueError):
    """A prompt's image cannot be read, has changed, or does not fit the model."""


class SnapshotError(RollqError):
    """A saved buffer cannot be written or restored: it is missing or damaged, or has another version."""


class ArchiveError(RollqError):
    """An archive does not hold what a caller asks for."""


class WeightsError(RollqError):
    """Weights are missing, truncated, or not the announced weights."""

"""Interprets the Redis driver's errors: which rollq error each becomes, and whether waiting helps."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from redis import exceptions as driver

from rollq.buffer.errors import ServerError, ServerRefused, ServerUnavailable


class Trouble(NamedTuple):
    """The meaning of a driver error: the error that it becomes, the remedy, and whether waiting helps."""

    error: type[ServerError]
    remedy: str
    answered: bool = True  # False: nobody answered
    passes: bool = True  # False: waiting does not help


UNANSWERED = Trouble(ServerUnavailable, "start it, or correct the URL (`rollq redis` starts one here)", answered=False)
LOGIN = Trouble(
    ServerRefused,
    "set the right password in ROLLQ_REDIS_PASSWORD, or its file in ROLLQ_REDIS_PASSWORD_FILE, and its user in "
    "ROLLQ_REDIS_USER",
    passes=False,
)
RIGHTS = Trouble(
    ServerRefused,
    "use the user of the role that runs this command (docs/guide/security.md); after an upgrade, make the ACL file "
    "again with `rollq runs acl`",
    passes=False,
)
MOVED = Trouble(ServerUnavailable, "the cluster has moved these keys: see `redis-cli cluster slots`")

TROUBLES: Mapping[str, Trouble] = {
    "LOADING": Trouble(ServerUnavailable, "it is still loading its data: try again later"),
    "BUSY": Trouble(ServerUnavailable, "another client's script blocks it: `redis-cli function kill` or `script kill`"),
    "MASTERDOWN": Trouble(ServerUnavailable, "it is a replica that has lost its primary"),
    "CLUSTERDOWN": Trouble(ServerUnavailable, "the cluster is incomplete: see `redis-cli cluster info`"),
    "TRYAGAIN": Trouble(ServerUnavailable, "the cluster is moving these keys: try again"),
    "UNBLOCKED": Trouble(ServerUnavailable, "it has become a replica"),
    "NOREPLICAS": Trouble(ServerUnavailable, "too few replicas are up: see `redis-cli info replication`"),
    "MISCONF": Trouble(ServerRefused, "it cannot write to its disk: see its log, free space"),
    "READONLY": Trouble(ServerRefused, "it is a read-only replica: give the URL of the primary"),
    "OOM": Trouble(ServerRefused, "its memory is full: raise maxmemory, or let the trainer catch up", passes=False),
    "NOAUTH": LOGIN,
    "WRONGPASS": LOGIN,
    "NOPERM": RIGHTS,
    "MOVED": MOVED,
    "ASK": MOVED,
    "CROSSSLOT": Trouble(ServerRefused, "it is a node of a cluster: give the URL of a plain server", passes=False),
    "DENIED": Trouble(ServerRefused, "it is in protected mode: make its users with `rollq runs acl`", passes=False),
}

# The driver cuts the code off the replies that it has a class for. Subclasses come before their bases.
CODES_BY_CLASS: tuple[tuple[type[driver.RedisError], str], ...] = (
    (driver.BusyLoadingError, "LOADING"),
    (driver.MasterDownError, "MASTERDOWN"),
    (driver.ClusterDownError, "CLUSTERDOWN"),
    (driver.TryAgainError, "TRYAGAIN"),
    (driver.ReadOnlyError, "READONLY"),
    (driver.OutOfMemoryError, "OOM"),
    (driver.AuthenticationError, "NOAUTH"),
    (driver.AuthenticationWrongNumberOfArgsError, "NOAUTH"),
    (driver.NoPermissionError, "NOPERM"),
    (driver.MovedError, "MOVED"),
    (driver.AskError, "ASK"),
    (driver.ClusterCrossSlotError, "CROSSSLOT"),
)

REFUSED_INSIDE = re.compile("ACL failure in script|The user executing the script can't")
"""How Valkey and Redis report a command inside a function that its caller may not send."""
GONE_ALREADY = re.compile("(Script a|A)ttempted to access a non local key")
"""How Redis and Valkey report a key that a function needs while its slot is moved key by key."""
TRANSACTION_NOTE = "Transaction discarded because of: "
"""The server's note before the error that made it discard a transaction."""
PIPELINE_NOTE = re.compile(r"Command # \d+ \(.*?\) of pipeline caused error: ", re.DOTALL)


def reply_text(error: driver.RedisError) -> str:
    """The server's words, without the driver's note before errors inside a pipeline."""
    if isinstance(error, driver.AskError):  # the driver has cut the words off
        return f"slot {error.slot_id} is on {error.host}:{error.port}"
    return PIPELINE_NOTE.sub("", str(error), count=1)


def code_of(error: driver.RedisError) -> str:
    """The code that the server's reply begins with, as in `OOM command not allowed`; "" when nobody answered."""
    for kind, code in CODES_BY_CLASS:
        if isinstance(error, kind):
            return code
    if not isinstance(error, driver.ResponseError):
        return ""
    text = reply_text(error)
    return (text.partition(TRANSACTION_NOTE)[2] or text).partition(" ")[0]


def diagnose(error: driver.RedisError) -> Trouble | None:
    """The trouble behind `error`; None if the error concerns a command and not the server."""
    if trouble := TROUBLES.get(code_of(error)):
        return trouble
    if isinstance(error, driver.ConnectionError | driver.TimeoutError):
        return UNANSWERED
    if GONE_ALREADY.search(reply_text(error)):
        return TROUBLES["TRYAGAIN"]
    return RIGHTS if REFUSED_INSIDE.match(reply_text(error)) else None

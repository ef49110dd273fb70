"""Facts about the folder or the bucket with a run's large payloads, and about its content."""

import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from rollq.buffer.errors import ConfigError, RunMismatch, ServerError, StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.servers import Servers
from rollq.monitor.doctor.facts import Space, read_space

ANSWER_S = 15.0
"""A folder or a bucket that takes longer than this counts as unreachable."""


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """`trouble` says why this machine cannot use the folder or the bucket, or is empty. `taken_bytes` is the total size
    of all groups' frames."""

    trouble: str = ""
    space: Space | None = None  # of a folder
    taken_bytes: int = 0


def read_payload_facts(servers: Servers, run: str, settings: PayloadSettings, patience: Patience) -> PayloadFacts:
    """Read the facts. Writes and removes an object beside the run's objects."""
    answer: Future[PayloadFacts] = Future()

    def read() -> None:
        try:
            answer.set_result(_read(servers, run, settings, patience))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)

    Thread(target=read, daemon=True).start()  # a file server that is down blocks its callers until it answers
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        return PayloadFacts(f"payloads.url = {settings.url!r}: does not answer within {ANSWER_S:g} s")


def _read(servers: Servers, run: str, settings: PayloadSettings, patience: Patience) -> PayloadFacts:
    try:
        buffer = MonitorBuffer(servers, run, patience, settings)
        if not _exists(buffer):
            _probe(buffer, f"{run}.", run)  # the run's roles make its folder
            return PayloadFacts(space=_space(settings))
        buffer.check_payloads()
        folder = buffer.payloads.folder(buffer.incarnation)
        _probe(buffer, f"{folder}/", folder)
        taken = [buffer.send("HGET", task_keys(run, task).progress, "bytes") for task in buffer.tasks()]
    except (ConfigError, ServerError, StoreLost) as error:
        return PayloadFacts(str(error))
    return PayloadFacts(space=_space(settings), taken_bytes=sum(int(each or 0) for each in taken))


def _exists(buffer: MonitorBuffer) -> bool:
    """Whether the run exists and can be read. If not, findings about its servers give the reason."""
    try:
        return bool(buffer.incarnation)
    except (StoreLost, RunMismatch, ServerError):
        return False


def _probe(buffer: MonitorBuffer, prefix: str, folder: str) -> None:
    if outside := buffer.payloads.outside:
        outside.probe(f"{prefix}doctor-{secrets.token_hex(8)}", folder)


def _space(settings: PayloadSettings) -> Space | None:
    return read_space(Path(settings.url)) if settings.url and not settings.url.startswith("s3:") else None

"""A trainer's lease on its run: renewed in a thread, and checked before every call that needs it.

Safety rests on the trainer's epoch, which the buffer's functions compare. The lease only keeps other trainers from
starting while this one is alive. If the trainer's process can be looked up, the lease ends with it, even if it is
killed. Otherwise, the lease ends `TRAINER_LEASE_S` after the last renewal.
"""

import logging
import threading
import time
from collections.abc import Callable

from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.training import TRAINER_LEASE_S
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import RollqError, ServerError, ServerRefused
from rollq.buffer.roles import TrainerBuffer
from rollq.consumer.claims.activity import Activity

log = logging.getLogger(__name__)

RENEW_S = TRAINER_LEASE_S / 3
HEARTBEAT_S = 1.0
"""How often the trainer reports its activity, which also renews the lease."""


class TrainerLease:
    """Holds a run for the trainer of `epoch`."""

    def __init__(
        self, buffer: TrainerBuffer, epoch: TrainerEpoch, renewed: Callable[[], None], activity: Activity
    ) -> None:
        """Take over `buffer`. `renewed` is called in the thread every `RENEW_S` seconds."""
        self.epoch = epoch
        self._activity = activity
        self._buffer = buffer
        self._renewed = renewed
        self._closing = threading.Event()
        self._refused = LogOnce(log)
        self._lost: RollqError | None = None
        self._thread = threading.Thread(target=self._renew, name="rollq-trainer-lease", daemon=True)

    def start(self) -> None:
        """Renew the lease in a thread from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop renewing, report how the trainer ended, release the run to other trainers, and close the buffer."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
            self._end()
        self._buffer.close()

    def _end(self) -> None:
        """End the lease, unless the run is lost."""
        try:
            self.buffer.end_lease(self.epoch, self._activity.words())
        except ServerError as error:
            log.warning("the trainer's lease remains for up to %.0f s: %s", TRAINER_LEASE_S, error)
        except RollqError as error:
            log.info("the trainer has no lease to end: %s", error)

    @property
    def buffer(self) -> TrainerBuffer:
        """The buffer. Raises `FencedError` or `StoreLost` if a renewal has found that the run is lost."""
        if self._lost is not None:
            raise self._lost
        return self._buffer

    def _renew(self) -> None:
        renewed_s = time.monotonic()
        while not self._closing.wait(HEARTBEAT_S):
            try:
                self._beat()
                if time.monotonic() - renewed_s >= RENEW_S:
                    self._check_server()
                    self._renewed()
                    renewed_s = time.monotonic()
            except ServerError as error:
                if not self._closing.is_set():
                    log.warning("cannot renew the trainer's lease: %s", error)
            except RollqError as error:  # fenced, or the store is lost: a retry is useless
                self._lost = error
                return

    def _check_server(self) -> None:
        """Warn if the server has started to evict keys: otherwise, nobody would notice the missing keys."""
        try:
            self._buffer.memory()
        except ServerRefused as error:
            self._refused.warning("server", "%s", error)

    def _beat(self) -> None:
        self._buffer.renew_trainer(self.epoch, self._activity.words())

"""A trainer's lease on its run: renewed in a thread, and checked before every call that needs it.

Safety rests on the trainer's epoch, which the buffer's functions compare. The lease only keeps other trainers from
starting while this one is alive.
"""

import logging
import threading
from collections.abc import Callable

from rollq.buffer.errors import RollqError, ServerError
from rollq.buffer.replies import TrainerEpoch
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.training import TRAINER_LEASE_S

log = logging.getLogger(__name__)

RENEW_S = TRAINER_LEASE_S / 3


class TrainerLease:
    """Holds a run for the trainer of `epoch`."""

    def __init__(self, buffer: TrainerBuffer, epoch: TrainerEpoch, renewed: Callable[[], None]) -> None:
        """Take over `buffer`. `renewed` is called in the thread after every renewal."""
        self.epoch = epoch
        self._buffer = buffer
        self._renewed = renewed
        self._closing = threading.Event()
        self._lost: RollqError | None = None
        self._thread = threading.Thread(target=self._renew, name="rollq-trainer-lease", daemon=True)

    def start(self) -> None:
        """Renew the lease in a thread from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop renewing, and close the buffer."""
        self._closing.set()
        self._buffer.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def buffer(self) -> TrainerBuffer:
        """The buffer. Raises `FencedError` or `StoreLost` if a renewal has found that the run is lost."""
        if self._lost is not None:
            raise self._lost
        return self._buffer

    def _renew(self) -> None:
        while not self._closing.wait(RENEW_S):
            try:
                self._buffer.renew_trainer(self.epoch)
                self._renewed()
            except ServerError as error:
                if not self._closing.is_set():
                    log.warning("cannot renew the trainer's lease: %s", error)
            except RollqError as error:  # fenced, or the store is lost: final
                self._lost = error
                return

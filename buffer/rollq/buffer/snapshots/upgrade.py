"""Upgrading a run in place, whose keys an older rollq has stored in another form: saved, deleted, and restored.

Each of the three can be repeated, and the run says which of them comes next, so an upgrade that dies is ended by
another one. Until then no role can use the run.
"""

from pathlib import Path

from rq import Queue

from rollq.buffer.calls.runs import DELETING, Deletion, summarize
from rollq.buffer.errors import ConfigError
from rollq.buffer.snapshots.folder import INDEX, Snapshot, read_index
from rollq.buffer.snapshots.restore import RESTORABLE, Restoring
from rollq.buffer.snapshots.save import Report, Saving
from rollq.buffer.store.keys import SCHEMA_VERSION


class Upgrading(Saving, Restoring, Deletion):
    """The call that upgrades a run."""

    def upgrade_run(self, backup: Path, queue: Queue, report: Report | None = None) -> Snapshot | None:
        """Store the run in the form of this rollq; None if it has that already. `backup` is a folder for its snapshot,
        which stays. Harmless to repeat with the same folder, and must be when it was interrupted.

        Raises `ConfigError` for a run that is not there, that a role uses, or that is too old or too new; and what
        saving, deleting and restoring raise.
        """
        found = summarize(self)
        _check_backup(backup, self.run, is_needed=found.state != "")
        if found.state == "":
            if found.schema == SCHEMA_VERSION:
                return None
            if found.schema not in RESTORABLE:
                raise ConfigError(
                    f"run {self.run!r} has schema {found.schema}, this rollq upgrades those with "
                    f"{', '.join(map(str, RESTORABLE[:-1]))}: use another rollq"
                )
            self.check_idle(found)
            self._incarnation = self.send("HGET", self.keys.info, "incarnation").decode()  # whatever its schema
            self.save(backup, replace=True, report=report)
        if found.state in ("", DELETING):
            self.delete_run(queue)
        self._incarnation = None
        return self.restore(backup, report=report)


def _check_backup(backup: Path, run: str, *, is_needed: bool) -> None:
    """Raise `ConfigError` when `backup` has a snapshot of another run, or has none where the upgrade needs it."""
    if (backup / INDEX).exists():
        saved = read_index(backup)[0].run
        if saved != run:
            raise ConfigError(f"--backup {str(backup)!r} has a snapshot of run {saved!r}: name another folder")
    elif is_needed:
        raise ConfigError(
            f"run {run!r} is not on this server, or its upgrade did not end: then give the same --backup as before"
        )

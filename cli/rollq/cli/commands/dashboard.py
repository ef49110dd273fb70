"""`rollq dashboard`: a live run on one page in a browser."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.cli.logs import log_options
from rollq.cli.options import allowed_host_option, run_options

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from rollq.buffer.archive.annotations import AnnotationReader
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.calls.orders import GroupOrder, Order, Ordered
    from rollq.buffer.values.rollouts import Status
    from rollq.cli.run_location import RunLocation
    from rollq.cli.run_reader import RunReader
    from rollq.monitor.dashboard.browsing import Rollouts
    from rollq.monitor.dashboard.groups import TokenTexts
    from rollq.monitor.dashboard.orders import Preview
    from rollq.monitor.status.read import RunStatus

TOKEN = "ROLLQ_DASHBOARD_TOKEN"
LEAST_TOKEN = 16
"""Minimum length of a token, in characters."""
BUSY_S = 10.0
"""How long a request waits for earlier requests, in seconds."""

T = TypeVar("T")


@click.command()
@run_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address at which to listen; 0.0.0.0: all.")
@allowed_host_option
@click.option("--port", type=click.IntRange(0, 65535), default=8484, show_default=True, help="Port; 0: any.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the token for changes; {TOKEN} can hold the token instead. Without a token, the page only reads.",
)
@click.option(
    "--archive", "archive_url", help="Show the archive in this folder or at this s3:// URL; no server is needed."
)
@log_options
def dashboard(
    file: Path | None,
    url: str | None,
    run_name: str | None,
    host: str,
    allowed_hosts: tuple[str, ...],
    port: int,
    token_file: Path | None,
    archive_url: str | None,
) -> None:
    """Show a run in a browser: its state, charts, workers, and every rollout down to single tokens.

    Reads the run at most once a second, however many pages are open. Viewing needs no password: on any address but
    127.0.0.1, keep strangers out. With --archive, FILE only names the tokenizer.

    \b
    Example:
      rollq dashboard rollq.toml
      rollq dashboard rollq.toml --token-file token.txt
      rollq dashboard --url redis://127.0.0.1:6379/0 --run sums --host 0.0.0.0 --allowed-host trainer-machine
      rollq dashboard rollq.toml --archive /mnt/shared/archive/sums
    """
    try:
        from rollq.monitor.dashboard.access import Guarded
        from rollq.monitor.dashboard.app import BROWSED, Dashboard
        from rollq.monitor.dashboard.browsing import Browsing
        from rollq.monitor.metrics.serving import serve
    except ModuleNotFoundError as error:
        message = f"`rollq dashboard` needs the package {error.name!r}: pip install 'rollq[dashboard]'"
        raise ConfigError(message) from error
    from rollq.cli.run_location import find_run
    from rollq.cli.run_reader import CurveFinder, RunReader
    from rollq.cli.signals import stop_on_signals
    from rollq.monitor.dashboard.trainer_values import TrainedReader
    from rollq.monitor.metrics.shared_status import SharedReading

    if archive_url is not None:
        if url or run_name or token_file:
            raise ConfigError(
                "--archive: an archive has no server and cannot be changed; leave out --url, --run and --token-file"
            )
        app = _archive(archive_url, token_texts(file))
        stop_on_signals()
        serve(Guarded(app), host, port, allowed_hosts)
        return
    token = _token(token_file)
    location = find_run(file, url, run_name)
    stop_on_signals()  # a signal ends the server, and has no further effect
    with RunReader(location, location.to_look_at) as reader:
        shared = _Shared(reader)
        trained = TrainedReader(lambda: _annotations(location.file, shared))
        rollouts, elsewhere = _rollouts(shared, location.archive_url)
        texts = token_texts(location.file)
        browsing = Browsing(location.run, rollouts, BROWSED, trained, texts, elsewhere=elsewhere)
        curves = CurveFinder(location, shared.call)
        page = Dashboard(location.run, shared, SharedReading(shared.read), browsing, curves, _Orders(location), token)
        serve(Guarded(page.app()), host, port, allowed_hosts, on_stop=page.events.stop)


def _rollouts(shared: "_Shared", archive_url: str | None) -> tuple["Rollouts", Sequence["Status"]]:
    """The groups in a run and its archive, and the statuses of groups that may be only in the archive."""
    from rollq.monitor.dashboard.live_rollouts import LiveRollouts

    live = LiveRollouts(shared)
    if archive_url is None:
        return live, ()
    from rollq.buffer.archive.reader import ARCHIVED_AS
    from rollq.buffer.archive.run_archive import RunArchive
    from rollq.monitor.dashboard.archived_rollouts import ArchivedRollouts

    return ArchivedRollouts(live, lambda: RunArchive(archive_url, shared.call).pages), ARCHIVED_AS


def _archive(url: str, texts: "TokenTexts") -> "Starlette":
    """The app for an archive. Raises `ConfigError`, `ArchiveError`."""
    from rollq.buffer.archive.annotations import AnnotationReader, root_of
    from rollq.buffer.archive.pages import ArchivePages
    from rollq.buffer.archive.reader import ARCHIVED_AS, Archive
    from rollq.monitor.dashboard.app import archive_app
    from rollq.monitor.dashboard.browsing import Browsing
    from rollq.monitor.dashboard.trainer_values import TrainedReader

    archive = Archive(url)
    pages = ArchivePages(archive)
    run, incarnation = pages.run, pages.incarnation
    trained = TrainedReader(
        lambda: AnnotationReader(root_of(archive.url, archive.names, run, incarnation), run, incarnation)
    )
    return archive_app(archive.url, pages.tasks(), Browsing(run, pages, ARCHIVED_AS, trained, texts))


def _annotations(file: Path | None, reader: "_Shared") -> "AnnotationReader | str":
    """A reader for the annotations that a run's trainer writes beside the archive, or why there is none."""
    from rollq.buffer.archive.annotations import AnnotationReader
    from rollq.cli.settings.file import load_settings

    wanted = "The trainer's logprob, mismatch, ratio and clipping of tokens come from the archive:"
    if file is None:
        return f"{wanted} instead of --url, give a rollq.toml that sets url in [archive]."
    if (url := load_settings(file).archive.url) is None:
        return f"{wanted} set url in [archive]."
    return AnnotationReader(url, *reader.call(lambda buffer: (buffer.run, buffer.incarnation)))


class _Shared:
    """A reader that many threads share: they take turns, so the run has one connection."""

    def __init__(self, reader: "RunReader") -> None:
        self._reader, self._lock = reader, threading.Lock()

    def read(self) -> "RunStatus":
        return self._alone(self._reader.read)

    def call(self, do: "Callable[[Buffer], T]") -> T:
        return self._alone(lambda: self._reader.call(do))

    def _alone(self, do: Callable[[], T]) -> T:
        if not self._lock.acquire(timeout=BUSY_S):
            raise ServerUnavailable(f"other requests have taken more than {BUSY_S:.0f} s: try again")
        try:
            return do()
        finally:
            self._lock.release()


class _Orders:
    """Makes changes, each over its own short connection."""

    def __init__(self, location: "RunLocation") -> None:
        self._location = location

    def preview(self, run: "RunStatus", order: "Order", kind: str, name: str) -> "Preview":
        from rollq.cli.changes import VERBS, change_of, names_of
        from rollq.monitor.dashboard.orders import Preview

        names = [""] if kind == "run" else names_of(run, kind)
        if name not in names:
            raise ConfigError(f"{kind} {name!r}: the run has {', '.join(names) or 'none'}")
        if kind != "run":
            change = change_of(run, order, kind, name)
            return Preview(change.title, change.text, change.is_possible)
        changes = [change_of(run, order, "task", task.task) for task in run.tasks]
        text = "\n".join(f"{change.name}: {change.text}" for change in changes)
        return Preview(f"{VERBS[order]} all tasks?", text, any(change.is_possible for change in changes))

    def make(self, order: "Order", kind: str, name: str) -> list[str]:
        from rollq.cli.steering import steer_tasks, steer_workers

        steer = steer_workers if kind == "worker" else steer_tasks
        with self._connect() as buffer:
            return list(steer(buffer, [name] if name else [], order))

    def order_group(self, task: str, group_id: int, order: "GroupOrder", *, dry_run: bool) -> "Ordered":
        with self._connect() as buffer:
            if task not in (tasks := buffer.tasks()):
                raise ConfigError(f"task {task!r}: the run has {', '.join(tasks) or 'none'}")
            return buffer.order_group(task, group_id, order, dry_run=dry_run)

    def _connect(self) -> "Buffer":
        from rollq.buffer.store.connection import Patience
        from rollq.cli.run_reader import UNANSWERED_S

        return self._location.without_payloads(Patience(UNANSWERED_S, UNANSWERED_S))


def _token(file: Path | None) -> str | None:
    """The token for changes, from the file or else the environment. Raises `ConfigError` for a token that is too
    short, and for a file that cannot be read."""
    name, token = TOKEN, os.environ.get(TOKEN)
    if file is not None:
        name = f"--token-file {str(file)!r}"
        try:
            token = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read: {error}") from error
    elif not token:
        return None
    if len(token) < LEAST_TOKEN:
        raise ConfigError(f"{name}: a token needs {LEAST_TOKEN} characters or more: `openssl rand -hex 16` makes one")
    return token


def token_texts(file: Path | None) -> "TokenTexts":
    """The texts of the run's tokens, by the tokenizer in its settings. Without a tokenizer, ids are shown."""
    from rollq.cli.settings.file import load_settings
    from rollq.monitor.dashboard.groups import TokenTexts

    if file is None:
        return TokenTexts(None, "Tokens are shown as ids: give rollq.toml, which names the tokenizer.")
    worker = load_settings(file).worker
    folder = worker.tokenizer or worker.options.get("model")
    if folder is None and worker.engine == "simulated":
        from rollq.workers.tokenizers.byte import ByteTokenizer

        bytes_only = ByteTokenizer()
        return TokenTexts(
            lambda ids: bytes_only.decode(list(ids), special=True), "Tokens are bytes, since the engine is simulated."
        )
    if folder is None:
        return TokenTexts(None, "Tokens are shown as ids: the settings name no tokenizer.")
    return _texts_by(Path(folder) / "tokenizer.json")


def _texts_by(path: Path) -> "TokenTexts":
    from rollq.monitor.dashboard.groups import TokenTexts

    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except ModuleNotFoundError:
        return TokenTexts(None, "Tokens are shown as ids: pip install tokenizers to see their text.")
    except Exception as error:  # noqa: BLE001  (the package raises bare exceptions)
        return TokenTexts(None, f"Tokens are shown as ids: {path} cannot be read: {error}")
    return TokenTexts(
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False), f"Decoded by the tokenizer {path}."
    )

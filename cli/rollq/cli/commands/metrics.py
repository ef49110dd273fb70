"""`rollq metrics`: serves the status of a run to Prometheus."""

from pathlib import Path

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.logs import log_options
from rollq.cli.options import allowed_host_option, run_options


@click.command()
@run_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address at which to listen; 0.0.0.0: all.")
@allowed_host_option
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="Port; 0: any.")
@log_options
def metrics(
    file: Path | None, url: str | None, run_name: str | None, host: str, allowed_hosts: tuple[str, ...], port: int
) -> None:
    """Serve metrics of a run to Prometheus at /metrics, until Ctrl-C. Changes nothing.

    Reads the run on each request, at most once a second. While the run cannot be read, rollq_up is 0. With
    [monitor] on_change in FILE, it also calls that command when the state of the run changes.

    \b
    Example:
      rollq metrics rollq.toml
      rollq metrics --url redis://127.0.0.1:6379/0 --run sums --host 0.0.0.0 --allowed-host metrics
    """
    try:
        from rollq.monitor.metrics.app import metrics_app
        from rollq.monitor.metrics.serving import serve
    except ModuleNotFoundError as error:
        message = f"`rollq metrics` needs the package {error.name!r}: pip install 'rollq[dashboard]'"
        raise ConfigError(message) from error
    from rollq.cli.run_location import find_run
    from rollq.cli.run_reader import RunReader
    from rollq.cli.settings.file import load_settings
    from rollq.cli.signals import stop_on_signals
    from rollq.monitor.changes.on_change import on_change
    from rollq.monitor.changes.settings import MonitorSettings
    from rollq.monitor.metrics.shared_status import SharedReading

    location = find_run(file, url, run_name)
    stop_on_signals()  # a signal ends the server, and has no further effect
    settings = load_settings(location.file).monitor if location.file else MonitorSettings()
    folder = (location.file or Path()).absolute().parent
    with (
        RunReader(location) as reader,
        RunReader(location) as watching,
        on_change(settings, location.run, folder, read=watching.read, replace=watching.note_state) as watcher,
    ):
        reading = SharedReading(reader.read)
        calls = watcher.calls.by_outcome if watcher else dict
        serve(metrics_app(location.run, reading.status, calls), host, port, allowed_hosts)

"""Reverb as a store: a queue of groups, each one step of a trajectory. `server` as the argument serves the queues."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks.peers.protocol import GROUP_SIZE, Columns, serve

SAMPLED, STREAMED = TABLES = ("sampled", "streamed")
"""Batches are taken with `Client.sample`, and single groups from a stream, which is faster for them."""
MOST_GROUPS = 100_000
STREAMED_AHEAD = 2
ROWS = (1, GROUP_SIZE)
SHAPES = {"prompt_ids": (*ROWS, None), "response_ids": (*ROWS, None), "logprobs": (*ROWS, None), "rewards": ROWS}
DTYPES = {"prompt_ids": tf.int32, "response_ids": tf.int32, "logprobs": tf.float32, "rewards": tf.float32}


class Reverb:
    """A client with one stream for writing, and one for reading single groups."""

    def __init__(self, address: str) -> None:
        self.version = f"Reverb {version('dm-reverb')}"
        self._client = reverb.Client(address)
        dataset = reverb.TrajectoryDataset(
            address,
            STREAMED,
            dtypes=DTYPES,
            shapes={name: tf.TensorShape(shape) for name, shape in SHAPES.items()},
            max_in_flight_samples_per_worker=STREAMED_AHEAD,
            num_workers_per_iterator=1,
        )
        self._stream = dataset.as_numpy_iterator()

    def prepare(self, groups: Sequence[Columns], calls: int) -> None:
        self._groups = groups
        self._table = SAMPLED if len(groups) > 1 else STREAMED
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=1)

    def exchange(self) -> NDArray[Any]:
        for group in self._groups:
            self._writer.append(group)
            step = {name: column[-1:] for name, column in self._writer.history.items()}
            self._writer.create_item(self._table, priority=1.0, trajectory=step)
        self._writer.flush()
        if self._table == STREAMED:
            return np.asarray(next(self._stream).data["response_ids"][-1, -1])
        taken = list(self._client.sample(SAMPLED, len(self._groups), emit_timesteps=False))
        return np.asarray(taken[-1].data[sorted(SHAPES).index("response_ids")][-1, -1])

    def finish(self) -> None:
        self._writer.close()


def serve_queues() -> None:
    """Serve the queues, and print the port, until standard input ends."""
    server = reverb.Server(tables=[reverb.Table.queue(table, MOST_GROUPS) for table in TABLES])
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def main() -> None:
    """Start the server and measure."""
    command = [sys.executable, "-m", "benchmarks.peers.through_reverb", "server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        serve(Reverb(f"localhost:{server.stdout.readline().strip()}"))


if __name__ == "__main__":
    serve_queues() if sys.argv[1:] == ["server"] else main()

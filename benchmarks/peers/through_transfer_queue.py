"""TransferQueue as a store: groups are the rows of a partition. Its controller and its storage are actors of Ray.

Its users store a row for each sample, which is slower: a group then has eight rows.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.peers.protocol import Columns, serve

PARTITION = "train"
MOST_ROWS = 1_000_000


class TransferQueue:
    """A client beside the two actors. Rows are removed after the timed part."""

    def __init__(self) -> None:
        self.version = f"TransferQueue {version('TransferQueue')}, Ray {ray.__version__}"
        self._client = tq.get_client()

    def prepare(self, groups: Sequence[Columns], calls: int) -> None:
        self._rows, self._fields = len(groups), list(groups[0])
        columns = {name: np.stack([group[name] for group in groups]) for name in self._fields}
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        self._data = TensorDict(tensors, batch_size=self._rows)

    def exchange(self) -> NDArray[Any]:
        self._client.put(data=self._data, partition_id=PARTITION)
        meta = self._client.get_meta(
            data_fields=self._fields, batch_size=self._rows, partition_id=PARTITION, task_name="train"
        )
        taken = self._client.get_data(meta)
        return np.asarray(taken["response_ids"][-1][-1])

    def finish(self) -> None:
        self._client.clear_partition(partition_id=PARTITION)


def main() -> None:
    """Start the actors and measure."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(
        OmegaConf.create({"backend": {"SimpleStorage": {"total_storage_size": MOST_ROWS, "num_data_storage_units": 1}}})
    )
    try:
        serve(TransferQueue())
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main()

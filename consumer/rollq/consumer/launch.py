"""One rank of `rollq train`: `torchrun --nproc-per-node 8 -m rollq.consumer.launch rollq.toml`.

It takes the arguments of `rollq train`, and ends with its launcher, even if the launcher is killed. `rollq train
--ranks` passes its process id in the environment variable `LAUNCHER`, in case that command ends before this process has
started. torchrun does not: ranks that start without torchrun find no store and fail.
"""

import os
import signal
import sys
from importlib.metadata import entry_points

from rollq.buffer.common.child_processes import die_with_parent

LAUNCHER = "ROLLQ_LAUNCHER"
"""Name of the environment variable with the launcher's process id."""


def main() -> None:
    """Run the command `rollq train` with the arguments of this process."""
    die_with_parent(signal.SIGKILL, int(os.environ.pop(LAUNCHER, os.getppid())))
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working folder, under torchrun: user code comes from the settings file's folder
    sys.argv[1:1] = ["train"]
    entry_points(group="console_scripts")["rollq"].load()()


if __name__ == "__main__":
    main()

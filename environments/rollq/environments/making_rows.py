"""The process that makes the rows of one environment: JSON on the standard input names the environment, and each row is
a line of output.

If the process fails, its last line on the standard error is the reason. Invariant: the process ends with its parent,
even if the parent is killed.
"""

import os
import signal
import sys
from pathlib import Path

from rollq.buffer.common import exact_json
from rollq.buffer.common.child_processes import die_with_parent
from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import kind_named, split_env


def main() -> int:
    """Write rows until they end or the reader is gone."""
    asked = exact_json.loads(sys.stdin.buffer.read())
    die_with_parent(signal.SIGKILL, asked["parent"])
    rows = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # packages may print
    kind, name = split_env(asked["env"])
    try:
        source = kind_named(kind).open(name, asked["options"], asked["split"], Path(asked["folder"]))
        for row in source.rows():
            rows.write(exact_json.dumps(row) + b"\n")
            rows.flush()
    except BrokenPipeError:
        os._exit(0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - the package of an environment may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

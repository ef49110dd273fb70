"""The Pythons that have packages of environments, which rollq's own does not: see `make environments`."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OPENENV = Path(os.environ.get("ROLLQ_OPENENV_PYTHON", ROOT / ".venv-openenv" / "bin" / "python"))
"""OpenEnv's."""
ENVIRONMENTS = Path(os.environ.get("ROLLQ_ENVIRONMENTS_PYTHON", ROOT / ".venv-environments" / "bin" / "python"))
"""Of the other packages."""

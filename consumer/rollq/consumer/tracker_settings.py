"""Settings of the experiment trackers that the reference trainer reports to: tables of `[trainer]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field

from rollq.buffer.rules.settings import Settings

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
_NAMED: Final = {"name": "a tracker's run has the name of rollq's run; leave it out"}


class TensorBoardSettings(Settings):
    """The folder from which TensorBoard reads."""

    folder: Path | None = Field(default=None, description="folder of the event files; default: tensorboard in output")


class WandbSettings(Settings):
    """A run of Weights & Biases. Its API key comes from WANDB_API_KEY."""

    project: str = Field(default="rollq", description="project of the run")
    entity: str | None = Field(default=None, description="user or team; default: the account's")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: only write to output, for `wandb sync`"
    )

    REMOVED: ClassVar[Mapping[str, str]] = _NAMED


class MlflowSettings(Settings):
    """A run of MLflow. The user and password come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    tracking_uri: str | None = Field(
        default=None, description="server or database of runs; default: MLFLOW_TRACKING_URI, or MLflow's default"
    )
    experiment: str = Field(default="rollq", description="experiment of the run; created if missing")

    REMOVED: ClassVar[Mapping[str, str]] = _NAMED

"""MLflow: metrics, and the rollouts of a step as an artifact, such as `rollouts/step-00000012.json`."""

import time
from dataclasses import asdict

from mlflow import MlflowClient
from mlflow.entities import Metric

from rollq.consumer.tracker_settings import MlflowSettings
from rollq.consumer.trackers.tracker import Entry

MOST_METRICS = 1000
"""The most metrics in one call to MLflow."""


class Mlflow:
    """An MLflow run. Each start of the trainer creates a new one."""

    def __init__(self, settings: MlflowSettings, run: str) -> None:
        self._client = MlflowClient(settings.tracking_uri)
        existing = self._client.get_experiment_by_name(settings.experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(settings.experiment)
        created = self._client.create_run(experiment, tags={"rollq.run": run}, run_name=run)
        self._run_id = created.info.run_id

    def log(self, entry: Entry) -> None:
        """Log an entry."""
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, entry.step) for name, value in entry.scalars.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics[start : start + MOST_METRICS])
        if entry.rollouts:
            rows = {"rollouts": [asdict(rollout) for rollout in entry.rollouts]}
            self._client.log_dict(self._run_id, rows, f"rollouts/step-{entry.step:08d}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

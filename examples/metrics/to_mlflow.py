"""Sends the metrics of a run to MLflow: heddle sft run.yaml log.command='python3 examples/metrics/to_mlflow.py EXPERIMENT'"""
import json
import sys

import mlflow


def flat(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


mlflow.set_experiment(sys.argv[1])
with mlflow.start_run() as run:
    for line in sys.stdin:
        row = json.loads(line)
        if "config" in row:
            mlflow.set_tag("mlflow.runName", row["run"])
            mlflow.log_params({key: str(value)[:500] for key, value in flat(row["config"])})
        else:
            mlflow.log_metrics({key: value for key, value in row.items() if isinstance(value, (int, float))}, step=row["step"])

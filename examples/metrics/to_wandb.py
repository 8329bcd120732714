"""Sends the metrics of a run to Weights & Biases: heddle sft run.yaml log.command='python3 examples/metrics/to_wandb.py PROJECT'"""
import json
import sys

import wandb

run = None
for line in sys.stdin:
    row = json.loads(line)
    if "config" in row:
        run = wandb.init(project=sys.argv[1], name=row["run"], id=row["run"].replace("/", "-"), config=row["config"], resume="allow")
    else:
        run.log(row, step=row["step"])
if run:
    run.finish()

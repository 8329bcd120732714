"""Recipes of the tinker cookbook, unchanged, against `heddle serve`. The cookbook lies in a folder, with what it needs besides the
packages of scripts/setup --oracle:

    pip install --no-deps --target COOKBOOK tinker-cookbook==0.6.1
    pip install --target COOKBOOK chz datasets==4.0.0 pyarrow==21.0.0 cloudpickle termcolor tiktoken blobfile pyrage aiohttp rich pillow
    pip install --no-deps --target COOKBOOK pylatexenc math-verify sympy mpmath latex2sympy2_extended antlr4-python3-runtime==4.13.2
    HEDDLE_COOKBOOK=COOKBOOK HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve/test_cookbook.py

(0.6.1 wants a package tml-renderers that only newer models need: hence --no-deps.) The model is tiny and random, so these show that the
recipes run and that what they train moves the right way, not that they learn a skill.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.serving import NAME, Server

FOLDER = os.environ.get("HEDDLE_COOKBOOK")
LIMIT_S = 300
REVISION = "0" * 40

pytestmark = pytest.mark.skipif(not FOLDER, reason="HEDDLE_COOKBOOK names no folder")


@pytest.fixture
def cache(model, tmp_path):
    """A Hugging Face cache in which the name of the family means this model's tokenizer."""
    folder = tmp_path / "hf" / "hub" / ("models--" + NAME.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(pathlib.Path(model) / name, snapshot / name)
    return tmp_path / "hf"


@pytest.fixture
def server(model, tmp_path):
    """Games have longer prompts than the other tests."""
    running = Server(model, tmp_path / "data").start("serve.max_context=1024")
    yield running
    assert running.stop() == 0


def recipe(server, cache, logs, module, *settings):
    """Runs a recipe to its end; its metrics, step by step."""
    done = subprocess.run(
        [sys.executable, "-m", "tinker_cookbook.recipes." + module, f"model_name={NAME}", f"log_path={logs}",
         "behavior_if_log_dir_exists=delete", *settings], capture_output=True, text=True, timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": FOLDER, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                          "TINKER_API_KEY": "tml-local", "TINKER_BASE_URL": server.url, "TINKER_TELEMETRY": "0", "WANDB_MODE": "disabled"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads(line) for line in open(pathlib.Path(logs) / "metrics.jsonl")]


def chat(server, cache, logs):
    data = pathlib.Path(FOLDER.split(os.pathsep)[0]) / "tinker_cookbook" / "example_data" / "conversations.jsonl"
    return recipe(server, cache, logs, "chat_sl.train", f"dataset={data}", "renderer_name=role_colon", "lora_rank=8", "max_length=128",
                  "batch_size=8", "learning_rate=3e-3", "max_steps=6", "lr_schedule=constant", "eval_every=0", "save_every=3")


def arithmetic(server, cache, logs):
    return recipe(server, cache, logs, "math_rl.train", "env=arithmetic", "loss_fn=importance_sampling", "renderer_name=role_colon",
                  "lora_rank=8", "group_size=4", "groups_per_batch=4", "max_tokens=5", "max_steps=2", "eval_every=0", "save_every=1")


def test_fine_tuning_on_conversations_lowers_the_loss(server, cache, tmp_path):
    steps = chat(server, cache, tmp_path / "log")
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert len(losses) == 6 and losses[-1] < losses[0], losses


def test_reinforcement_and_fine_tuning_at_once(server, cache, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        rl = pool.submit(arithmetic, server, cache, tmp_path / "rl")
        sl = pool.submit(chat, server, cache, tmp_path / "sl")
        steps = rl.result()
        assert len(sl.result()) >= 6
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    assert len(rewards) == 2, steps


def test_a_game_of_several_turns(server, cache, tmp_path):
    steps = recipe(server, cache, tmp_path / "log", "multiplayer_rl.guess_number.train", "renderer_name=role_colon", "batch_size=2",
                   "group_size=2", "max_tokens=4", "max_steps=1", "eval_every=0")
    assert steps

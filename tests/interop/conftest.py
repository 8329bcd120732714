"""Shared by the interop tests: the program, tiny models, and helpers. Run with

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop
    ... --shard 1/2         # the first half of them: neither the program nor transformers uses more than a core on tiny models
"""
import json
import os
import pathlib
import subprocess

import pytest

import tiny_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEDDLE = os.environ.get("HEDDLE", str(ROOT / "build/cpu/src/cli/heddle"))


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="every N-th test, from the I-th on; default: all")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--shard"):
        shard, shards = map(int, config.getoption("--shard").split("/"))
        if not 1 <= shard <= shards:
            raise pytest.UsageError(f"--shard {shard}/{shards}: expected a number from 1 to {shards}")
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % shards != shard - 1])
        items[:] = items[shard - 1 :: shards]


def heddle(*arguments, check=True):
    # Tiny models on a machine that does other things: waiting for a second thread costs more than it brings.
    arguments = [*arguments, *(["device.threads=1"] if arguments[0] in ("sft", "pt", "rl") else
                               ["--threads", "1"] if arguments[0] in ("score", "generate") else [])]
    result = subprocess.run([HEDDLE, *map(str, arguments)], capture_output=True, text=True)
    if check and result.returncode != 0:
        raise AssertionError(f"heddle {' '.join(map(str, arguments))}\nexit {result.returncode}\n{result.stderr}")
    return result


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.main(folder)
    return folder

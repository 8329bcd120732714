"""Shared by the interop tests: the program, tiny models, and helpers. Run with

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop
"""
import json
import os
import pathlib
import subprocess

import pytest

import tiny_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEDDLE = os.environ.get("HEDDLE", str(ROOT / "build/cpu/src/cli/heddle"))


def heddle(*arguments, check=True):
    # Tiny models on a machine that does other things: waiting for a second thread costs more than it brings.
    arguments = [*arguments, *(["device.threads=1"] if arguments[0] in ("sft", "pt") else
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

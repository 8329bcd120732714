"""Older tinker SDKs against `heddle serve`. Each lies in a folder of its own:

    for version in 0.16.1 0.24.1 0.28.1 0.33.1; do pip install --target SDKS/$version tinker==$version; done
    HEDDLE_OLD_SDKS=SDKS HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve/test_old_sdks.py
"""
import os
import pathlib
import subprocess
import sys

import pytest

from serve.serving import NAME

FOLDER = os.environ.get("HEDDLE_OLD_SDKS")
LIMIT_S = 120


@pytest.mark.skipif(not FOLDER, reason="HEDDLE_OLD_SDKS names no folder of SDKs")
@pytest.mark.parametrize("version", ["0.16.1", "0.24.1", "0.28.1", "0.33.1"])
def test_trains_saves_loads_and_samples(server, version):
    flow = pathlib.Path(__file__).with_name("old_sdk_flow.py")
    done = subprocess.run([sys.executable, str(flow), server.url, NAME], capture_output=True, text=True, timeout=LIMIT_S,
                          env=os.environ | {"PYTHONPATH": str(pathlib.Path(FOLDER) / version)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert version in done.stdout

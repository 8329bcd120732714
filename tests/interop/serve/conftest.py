import subprocess

import pytest

from serving import HEDDLE, ROOT, Server


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "model"
    subprocess.run([HEDDLE, "init", "--preset", "small-2m", "--tokenizer", str(ROOT / "examples/tokenizer-4k"), "--output", str(folder),
                    "--seed", "1"], check=True, capture_output=True)
    return folder


@pytest.fixture
def server(model, tmp_path):
    running = Server(model, tmp_path / "data").start()
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0

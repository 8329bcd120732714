import json
import struct
import subprocess

import numpy
import pytest

from serve.serving import HEDDLE, ROOT, Server

HEAD_FACTOR = 6


def enlarge_head(file):
    """Random heads are too small to be sure of anything: with them the loss of a token cannot fall below 5.7 nats."""
    content = bytearray(file.read_bytes())
    size, = struct.unpack("<Q", content[:8])
    first, last = json.loads(content[8:8 + size])["model.embed_tokens.weight"]["data_offsets"]  # the head is tied to it
    table = numpy.frombuffer(content, numpy.float32, count=(last - first) // 4, offset=8 + size + first)
    table *= HEAD_FACTOR
    file.write_bytes(content)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "model"
    subprocess.run([HEDDLE, "init", "--preset", "small-2m", "--tokenizer", str(ROOT / "examples/tokenizer-4k"), "--output", str(folder),
                    "--seed", "1", "--dtype", "float32"], check=True, capture_output=True)
    enlarge_head(folder / "model.safetensors")
    return folder


@pytest.fixture
def server(model, tmp_path):
    running = Server(model, tmp_path / "data").start()
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0

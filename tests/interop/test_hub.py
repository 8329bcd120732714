"""Models and data by name, against a local server of the hubs' protocols, and with huggingface_hub on the same cache."""
import json
import os
import subprocess
import sys

import pytest

from conftest import HEDDLE, read_rows, write_rows
from hub_server import COMMIT, Hub, git_hash, sha256

ROWS = b"".join(json.dumps({"input_ids": [5, 6, 7, 8 + i]}).encode() + b"\n" for i in range(6))


@pytest.fixture(scope="session")
def files(models):
    folder = models / "dense_tied"
    found = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    return found | {"pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"onnx", "empty.txt": b""}


class World:
    """A cache of its own, and the program in it."""

    def __init__(self, folder, hub, **more):
        folder.mkdir(parents=True, exist_ok=True)
        self.home = folder / "hf"
        self.rows = write_rows(folder / "rows.jsonl", [{"input_ids": [5, 6, 7, 8]}])
        self.out = folder / "out.jsonl"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MODELSCOPE_"))}
        self.environment |= {"HF_HOME": str(self.home), "HF_ENDPOINT": hub.url, "MODELSCOPE_DOMAIN": hub.url,
                             "MODELSCOPE_CACHE": str(folder / "ms"), **more}

    def heddle(self, *arguments):
        return subprocess.run([HEDDLE, *map(str, arguments)], capture_output=True, text=True, env=self.environment)

    def score(self, name):
        return self.heddle("score", name, "--input", self.rows, "--output", self.out, "--threads", "1")

    def python(self, code):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=self.environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    @property
    def folder(self):
        return self.home / "hub" / "models--org--tiny"


def test_downloads_into_the_cache_that_python_reads(tmp_path, files):
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        result = world.score("org/tiny")
        assert result.returncode == 0, result.stderr
        assert len(read_rows(world.out)) == 1
        asked = {path.split("/")[-1] for _, path, *_ in hub.downloads()}
        assert "model.safetensors" in asked and not asked & {"pytorch_model.bin", "model.onnx"}
        snapshot = world.folder / "snapshots" / COMMIT
        assert (world.folder / "refs/main").read_text() == COMMIT
        link = os.readlink(snapshot / "model.safetensors")
        assert link == f"../../blobs/{sha256(files['model.safetensors'])}"
        assert os.readlink(snapshot / "config.json") == f"../../blobs/{git_hash(files['config.json'])}"
        # Whole: nothing is asked again, by Heddle or by Python.
        count = len(hub.requests)
        assert world.score("org/tiny").returncode == 0
        assert len(hub.requests) == count
        path = world.python("import huggingface_hub as h; print(h.hf_hub_download('org/tiny', 'model.safetensors'))")
        assert path == str(snapshot / "model.safetensors")
        whole = world.python("import huggingface_hub as h; print(h.snapshot_download('org/tiny', allow_patterns=['*.safetensors', '*.json']))")
        assert whole == str(snapshot)
        assert len([r for r in hub.downloads() if r[1].endswith("model.safetensors")]) == 1


def test_finds_what_python_downloaded(tmp_path, files):
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        world.python("import huggingface_hub as h; h.snapshot_download('org/tiny')")
        count = len(hub.requests)
        for name in ("org/tiny", "hf://org/tiny", f"hf://org/tiny@{COMMIT}", world.folder):
            result = world.score(name)
            assert result.returncode == 0, result.stderr
        assert len(hub.requests) == count


def test_adds_what_python_left_out(tmp_path, files):
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        world.python("import huggingface_hub as h; h.snapshot_download('org/tiny', allow_patterns='*.json')")
        assert world.score("org/tiny").returncode == 0
        assert len([r for r in hub.downloads() if r[1].endswith("/config.json")]) == 1


def test_goes_on_where_connections_break(tmp_path, files):
    large = len(files["model.safetensors"])
    with Hub({"org/tiny": files}, faults={"model.safetensors": ("cut", large // 3 + 1), "config.json": ("busy", 2)}) as hub:
        world = World(tmp_path, hub)
        result = world.score("org/tiny")
        assert result.returncode == 0, result.stderr
        ranges = [r[2] for r in hub.downloads() if r[1].endswith("model.safetensors")]
        assert ranges == [None, f"bytes={large // 3 + 1}-", f"bytes={2 * (large // 3 + 1)}-"]


def test_continues_what_a_killed_download_left(tmp_path, files):
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        content = files["model.safetensors"]
        part = world.folder / "blobs" / (sha256(content) + ".incomplete")
        part.parent.mkdir(parents=True)
        part.write_bytes(content[:1000])
        assert world.score("org/tiny").returncode == 0
        assert [r[2] for r in hub.downloads() if r[1].endswith("model.safetensors")] == ["bytes=1000-"]
    # A server without ranges sends all of it again, which replaces the part.
    with Hub({"org/tiny": files}, faults={"model.safetensors": ("whole",)}) as hub:
        world = World(tmp_path / "other", hub)
        part = world.folder / "blobs" / part.name
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * 1000)
        assert world.score("org/tiny").returncode == 0


def test_refuses_other_content(tmp_path, files):
    with Hub({"org/tiny": files}, faults={"resolve/" + COMMIT + "/config.json": ("wrong", 1)}) as hub:
        assert World(tmp_path / "once", hub).score("org/tiny").returncode == 0
    with Hub({"org/tiny": files}, faults={"model.safetensors": ("wrong", 9)}) as hub:
        world = World(tmp_path / "always", hub)
        result = world.score("org/tiny")
        assert result.returncode == 2 and "another content than the hub announces" in result.stderr
        assert not (world.folder / "snapshots" / COMMIT / "model.safetensors").exists()
        assert not list((world.folder / "blobs").glob(sha256(files["model.safetensors"]) + "*"))


def test_says_what_to_do(tmp_path, files):
    with Hub({"org/tiny": files}, token="secret") as hub:
        result = World(tmp_path / "a", hub).score("org/tiny")
        assert result.returncode == 2 and "HF_TOKEN" in result.stderr and result.stderr.count("\n") == 1
        world = World(tmp_path / "b", hub, HF_TOKEN="secret")
        assert world.score("org/tiny").returncode == 0
        result = world.score("org/other")
        assert result.returncode == 2 and "no model of this name" in result.stderr
        assert "no such file or folder here" in result.stderr
    with Hub({"org/tiny": files}, faults={"/revision/": 429}) as hub:
        result = World(tmp_path / "c", hub).score("hf://org/tiny")
        assert result.returncode == 2 and "asks to wait" in result.stderr
    world = World(tmp_path / "d", hub)  # the server is gone
    result = world.score("org/tiny")
    assert result.returncode == 2 and "hf download org/tiny --local-dir" in result.stderr
    world.environment["HF_HUB_OFFLINE"] = "1"
    result = world.score("org/tiny")
    assert result.returncode == 2 and "HF_HUB_OFFLINE" in result.stderr


def test_the_token_stays_with_the_hub(tmp_path, files):
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        (world.home).mkdir()
        (world.home / "token").write_text("stored\n")
        assert world.score("org/tiny").returncode == 0
        assert {r[3] for r in hub.requests} == {"Bearer stored"}


def test_names_that_lead_out_are_refused(tmp_path, files):
    with Hub({"org/tiny": files | {"../../evil.json": b"{}"}}) as hub:
        world = World(tmp_path, hub)
        result = world.score("org/tiny")
        assert result.returncode == 2 and "leads out of the folder" in result.stderr
        assert not list(tmp_path.rglob("evil.json"))


def test_a_full_disk_is_said(tmp_path, files):
    """A limit on the size of files stands for the disk: a write fails in the midst of a download."""
    with Hub({"org/tiny": files}) as hub:
        world = World(tmp_path, hub)
        command = f"trap '' XFSZ; ulimit -f 64; exec {HEDDLE} score org/tiny --input {world.rows} --output {world.out}"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=world.environment)
        assert result.returncode == 1 and "cannot write" in result.stderr and ".incomplete" in result.stderr
        assert world.score("org/tiny").returncode == 0


def test_modelscope(tmp_path, files):
    with Hub({"org/tiny.5": files}) as hub:
        world = World(tmp_path, hub)
        result = world.score("ms://org/tiny.5")
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "ms/models/org/tiny___5/model.safetensors").read_bytes() == files["model.safetensors"]
        count = len(hub.requests)
        assert world.score("ms://org/tiny.5").returncode == 0
        assert len(hub.requests) == count


def test_data_by_name(tmp_path, files):
    data = {"README.md": b"#", "data/train.jsonl": ROWS, "data/validation.jsonl": ROWS[:56], "data/test.jsonl": b"{"}
    several = {"main/train.jsonl": ROWS, "other/train.jsonl": ROWS}
    with Hub({"org/tiny": files}, {"org/rows": data, "org/several": several}) as hub:
        world = World(tmp_path, hub)

        def sft(*settings):
            return world.heddle("sft", "model.path=org/tiny", f"train.output_dir={tmp_path / 'run'}", "train.max_steps=1",
                                "data.max_length=32", "device.threads=1", *settings)

        result = sft("data.train=org/rows", "data.eval=org/rows")
        assert result.returncode == 0, result.stderr
        asked = [path for _, path, *_ in hub.downloads() if "/datasets/" in path]
        assert sorted(path.split("/")[-1] for path in asked) == ["train.jsonl", "validation.jsonl"]
        result = sft("data.train=org/several")
        assert result.returncode == 2 and "several sets of rows" in result.stderr
        result = world.heddle("tokenize", "model.path=org/tiny", "--input", "hf://datasets/org/several/main", "--rows", "1")
        assert result.returncode == 0, result.stderr
        result = sft("data.train=org/none")
        assert result.returncode == 2 and "no data set of this name" in result.stderr

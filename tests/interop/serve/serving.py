"""A server over a small model with random weights, for clients that know nothing of Heddle."""
import os
import pathlib
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]
HEDDLE = os.environ.get("HEDDLE", str(ROOT / "build/cpu/src/cli/heddle"))
NAME = "Qwen/Qwen3.5-4B"  # clients know the families by such names; the weights are random
STOP_S = 60

os.environ.setdefault("TINKER_TELEMETRY", "0")
# Clients look for the tokenizer of a model by its name; none of these tests needs one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Server:
    """`heddle serve` in a process of its own, which a test may end and start again."""

    def __init__(self, model, data):
        self.model, self.data = model, data
        self.process, self.url, self.port = None, None, "0"

    def start(self, *settings, stderr=None):
        self.process = subprocess.Popen(
            [HEDDLE, "serve", str(self.model), "--name", NAME, "--port", self.port, "--data-dir", str(self.data), "device.name=cpu",
             "device.threads=1", "serve.max_context=256", "serve.max_sequences=8", *settings],
            stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.url
        self.port = self.url.rsplit(":", 1)[1]  # clients go on with a server that is started again
        return self

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(timeout=STOP_S)

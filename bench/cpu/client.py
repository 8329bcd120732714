"""A client of `heddle serve` that needs of Python the standard library alone, and a server to ask; for the programs here."""
import contextlib
import http.client
import json
import os
import pathlib
import struct
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEDDLE = os.environ.get("HEDDLE", str(ROOT / "build/cpu/src/cli/heddle"))


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def messages(data):
    """Fields (number, value) of a protobuf message of numbers and bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        yield key >> 3, value


def completions_of(response):
    """(tokens, logprobs) of each sequence of a SampleResponse."""
    for number, sequence in messages(response):
        if number == 1:
            fields = dict(messages(sequence))
            yield [list(struct.unpack(f"<{len(fields[i]) // 4}{kind}", fields[i])) for i, kind in ((2, "i"), (3, "f"))]


class Client:
    """One connection of a client with a session of its own."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self.session, self.runs = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"], 0

    def post(self, path, body):
        self.connection.request("POST", "/api/v1/" + path, json.dumps(body), {"Content-Type": "application/json",
                                                                              "Accept": "application/x-protobuf"})
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status not in (200, 204):
            raise SystemExit(f"{path}: {answer.status} {content[:300]}")
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return json.loads(content) if is_json and content else content

    def wait(self, promise):
        while True:
            answer = self.post("retrieve_future", {"request_id": promise["request_id"]})
            if isinstance(answer, bytes):
                return answer
            if "error" in answer:
                raise SystemExit(f"a promise failed: {answer['error']}")
            if answer.get("type") != "try_again":
                return answer

    def create_model(self, **lora_config):
        self.runs += 1
        return self.wait(self.post("create_model", {"session_id": self.session, "model_seq_id": self.runs - 1, "base_model": "base",
                                                    "lora_config": lora_config}))["model_id"]

    def end(self):
        self.post(f"sessions/{self.session}/finish", {"reason": {"type": "success"}})


def make_model(preset, folder):
    """Random weights of a named shape."""
    subprocess.run([HEDDLE, "init", "--preset", preset, "--tokenizer", str(ROOT / "examples/tokenizer-4k"), "--output", folder], check=True,
                   capture_output=True)


@contextlib.contextmanager
def serving(model, data, settings):
    """The port of a server of the model, which is called "base"."""
    server = subprocess.Popen([HEDDLE, "serve", model, "--name", "base", "--port", "0", "--data-dir", data, *settings],
                              stdout=subprocess.PIPE, text=True)
    try:
        yield int(server.stdout.readline().rsplit(":", 1)[1])
    finally:
        server.terminate()
        server.wait()

"""Keys, tokens and passwords: sent to whom they belong, and in no message, file, command line or other program's environment."""
import base64
import http.server
import json
import os
import pathlib
import re
import subprocess
import threading
import time

import pytest
from conftest import HEDDLE, write_rows
from hub_server import Hub
from serve.serving import Server
from test_hub import World, files  # noqa: F401 (a fixture)
from test_rl import arguments_of

SECRET = "s3cr3t-0123456789abcdef"


def everything_in(folder):
    return b"".join(str(p).encode() + (p.read_bytes() if p.is_file() else b"") for p in sorted(pathlib.Path(folder).rglob("*")))


@pytest.mark.parametrize("variables", [{"HF_TOKEN": SECRET}, {"HUGGING_FACE_HUB_TOKEN": SECRET + "\n"}, {"token file": SECRET},
                                       {"MODELSCOPE_API_TOKEN": SECRET}, {"password": SECRET}])
@pytest.mark.parametrize("outcome", ["found", "no such model", "refused", "gone"])
def test_a_hubs_token_is_shown_to_the_hub_alone(tmp_path, files, variables, outcome):  # noqa: F811
    with Hub({"org/tiny": files}, faults={"/revision/": 403, "/repo": 403} if outcome == "refused" else {}) as hub:
        world = World(tmp_path, hub, **{k: v for k, v in variables.items() if k.isupper()})
        if "token file" in variables:
            world.environment["HF_TOKEN_PATH"] = str(tmp_path / "token")
            (tmp_path / "token").write_text(SECRET + "\n")
        if "password" in variables:
            world.environment["HF_ENDPOINT"] = hub.url.replace("://", f"://ann:{SECRET}@")
        place = "ms://" if "MODELSCOPE_API_TOKEN" in variables else "hf://"
        if outcome == "gone":
            hub.server.shutdown()
            hub.server.server_close()
        name = "org/other" if outcome == "no such model" else "org/tiny"
        result = world.score(place + name)
        assert (result.returncode == 0) == (outcome == "found"), result.stderr
        assert SECRET not in result.stdout + result.stderr
        (tmp_path / "token").unlink(missing_ok=True)
        assert SECRET.encode() not in everything_in(tmp_path)
        shown = "Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode() if "password" in variables else f"Bearer {SECRET}"
        if outcome == "found" and "MODELSCOPE_API_TOKEN" not in variables:
            assert {request[3] for request in hub.requests} == {shown}


@pytest.mark.parametrize("variables", [{"HF_TOKEN": SECRET}, {"password": SECRET}])
@pytest.mark.parametrize("part", ["/resolve/", "/revision/", "/tree/"])
def test_a_hubs_token_does_not_follow_a_redirection(tmp_path, files, variables, part):  # noqa: F811
    with Hub({"org/tiny": files}) as other, Hub({"org/tiny": files}, faults={part: ("redirect", other.url)}) as hub:
        world = World(tmp_path, hub, **{k: v for k, v in variables.items() if k.isupper()})
        if "password" in variables:
            world.environment["HF_ENDPOINT"] = hub.url.replace("://", f"://ann:{SECRET}@")
        assert world.score("org/tiny").returncode == 0
        assert other.requests and {request[3] for request in other.requests} == {None}


class Rewards(http.server.BaseHTTPRequestHandler):
    """A reward server that wants a token now and then fails."""

    seen, failures = [], 0

    def log_message(self, *_):
        pass

    def do_POST(self):
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Rewards.seen.append(self.headers.get("Authorization"))
        Rewards.failures += 1
        status = 503 if Rewards.failures % 3 == 1 else 200
        body = json.dumps([{"id": sample["id"], "reward": len(sample["completion"]) % 5 / 5} for sample in samples]).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def reward_server():
    Rewards.seen, Rewards.failures = [], 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rewards)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["token", "password", "section", "file"])
def test_a_reward_servers_token_is_in_no_file_of_the_run(models, tmp_path, reward_server, how):
    url = f"http://{'ann:' + SECRET + '@' if how == 'password' else ''}{reward_server}/score"
    settings = [f"rl.reward.url={url}"] + ([f"rl.reward.token={SECRET}"] if how == "token" else [])
    if how == "section":
        settings = [f"rl.reward={{url: '{url}', token: {SECRET}}}"]
    words = [word for word in arguments_of(models / "dense_tied", tmp_path, "run", "full", *settings, "train.max_steps=2", "ckpt.every=1",
                                           "log.report=true", "log.tensorboard=true", f"log.command=cat > {tmp_path}/told",
                                           "device.threads=1") if "verifiers" not in word]
    if how == "file":
        (tmp_path.parent / "own.yaml").write_text(f"rl: {{reward: {{url: '{url}', token: {SECRET}}}}}\n")
        words = [words[0], tmp_path.parent / "own.yaml", *(word for word in words[1:] if not word.startswith("rl.reward"))]
    result = subprocess.run([HEDDLE, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Rewards.seen and None not in Rewards.seen and "asked" not in result.stderr
    assert SECRET not in result.stdout + result.stderr
    assert SECRET.encode() not in everything_in(tmp_path)
    assert b"(hidden)" in everything_in(tmp_path / "run")


def test_a_servers_keys_are_in_no_message_and_for_its_user_alone(models, tmp_path):
    before = os.umask(0)
    try:
        add = [HEDDLE, "serve", "keys", "add", "--data-dir", tmp_path / "data", "--tenant"]
        keys = [subprocess.run([*map(str, add), tenant], check=True, capture_output=True, text=True).stdout.split()[-1]
                for tenant in ("ann", "bob")]
        server = Server(models / "dense_tied", tmp_path / "data")
        with open(tmp_path / "log", "w") as log:
            server.start("serve.poll_s=1", stderr=log)
        try:
            import urllib.error
            import urllib.request
            for key in (*keys, "tml-" + "0" * 64, ""):
                for header in ("X-API-Key", "Authorization"):
                    value = f"Bearer {key}" if header == "Authorization" else key
                    for path, body in (("/v1/models", None), ("/api/v1/create_session", b"{"), ("/v1/completions", b'{"model": 7}')):
                        request = urllib.request.Request(server.url + path, body, {header: value, "Content-Type": "application/json"})
                        try:
                            urllib.request.urlopen(request, timeout=30).read()
                        except urllib.error.HTTPError as error:
                            assert key == "" or key not in error.read().decode()
        finally:
            assert server.stop() == 0
    finally:
        os.umask(before)
    said = (tmp_path / "log").read_bytes() + everything_in(tmp_path / "data")
    for key in keys:
        assert key.encode() not in said
        listed = subprocess.run([HEDDLE, "serve", "keys", "list", "--data-dir", str(tmp_path / "data")], check=True, capture_output=True,
                                text=True).stdout
        assert key not in listed and key[:12] in listed
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_the_secret_of_a_job_is_in_no_log_and_on_no_command_line(models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7, 8 + i]} for i in range(8)])
    for kind in ("made", "file"):
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "secret").chmod(0o600)
        given = ["--secret-file", str(tmp_path / "secret")] if kind == "file" else []
        words = [HEDDLE, "launch", "--nproc", "2", *given, "--log-dir", str(tmp_path / kind / "logs"), "--", "pt",
                 f"model.path={models / 'dense_tied'}", f"data.train={rows}", f"train.output_dir={tmp_path / kind / 'run'}", "parallel.fsdp=2",
                 "train.max_steps=400", "train.global_batch_size=2", "device.threads=1", f"log.command=env > {tmp_path}/{kind}/environment"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        commands, secrets, end = "", set(), time.monotonic() + 100
        while time.monotonic() < end and not (secrets and (tmp_path / kind / "environment").exists()):
            for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                try:
                    commands += pathlib.Path(f"/proc/{child}/cmdline").read_text()
                    secrets |= set(re.findall(r"HEDDLE_LAUNCH_SECRET=([^\0]+)", pathlib.Path(f"/proc/{child}/environ").read_text()))
                except OSError:
                    pass
            time.sleep(0.05)
        process.terminate()
        said = process.communicate(timeout=60)[0]
        assert len(secrets) == 1 and (kind == "made" or secrets == {SECRET})
        secret = secrets.pop()
        (tmp_path / "secret").unlink()
        assert secret not in commands + said
        assert secret.encode() not in everything_in(tmp_path / kind)
        assert b"PATH=" in (tmp_path / kind / "environment").read_bytes()

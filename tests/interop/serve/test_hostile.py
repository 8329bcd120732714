"""Hostile and mistaken clients against `heddle serve`: each request gets its refusal, and the server lives on."""
import http.client
import json
import random
import subprocess

import pytest
import zstandard

from serve.serving import HEDDLE, NAME, Server

ROUNDS = 400
POSTS = ["client/config", "client/dynamic_config", "create_session", "session_heartbeat", "sessions/search", "sessions/x/finish",
         "retrieve_future", "retrieve_futures", "cancel_future", "create_model", "get_info", "forward_backward", "forward", "optim_step",
         "unload_model", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "weights_info",
         "create_sampling_session", "join_sampling_session", "asample", "create_custom_loss", "copy_weights"]
FIELDS = ["session_id", "model_id", "model_seq_id", "seq_id", "base_model", "lora_config", "path", "tinker_path", "request_id", "target",
          "sampling_session_id", "sampling_session_seq_id", "prompt", "sampling_params", "num_samples", "adam_params", "optimizer",
          "forward_backward_input", "forward_input", "limit", "cursor", "reason", "timeout", "retrieved_request_ids", "prev_cursor",
          "source_path", "destination_project_id", "ttl_seconds", "prompt_alt_tokens_k", "weights_access_token"]


class Caller:
    """Requests of one key, over connections of their own."""

    def __init__(self, server, key="tml-local"):
        self.port, self.key = int(server.port), key

    def call(self, method, path, body=b"", **headers):
        """Status, headers and JSON of the answer (None if it is empty)."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, "/api/v1/" + path, body,
                               {"X-API-Key": self.key, "Content-Type": "application/json",
                                **{name.replace("_", "-"): value for name, value in headers.items()}})
            answer = connection.getresponse()
            content = answer.read()
            is_json = content and answer.headers.get("Content-Type", "").startswith("application/json")
            return answer.status, answer.headers, json.loads(content) if is_json else None
        finally:
            connection.close()

    def post(self, path, body, **headers):
        return self.call("POST", path, body, **headers)

    def session(self):
        status, _, answer = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})
        assert status == 200, answer
        return answer["session_id"]

    def outcome(self, path, body):
        status, _, promise = self.post(path, body)
        assert status == 200, promise
        while True:
            _, _, answer = self.post("retrieve_future", {"request_id": promise["request_id"]})
            if answer.get("type") != "try_again":
                return answer

    def run(self, session, seq=0):
        return self.outcome("create_model", {"session_id": session, "model_seq_id": seq, "base_model": NAME,
                                             "lora_config": {"rank": 4}})["model_id"]


def key_of(data, tenant, scopes):
    made = subprocess.run([HEDDLE, "serve", "keys", "add", "--data-dir", str(data), "--tenant", tenant, "--scopes", scopes],
                          check=True, capture_output=True, text=True)
    return made.stdout.split()[-1]


@pytest.fixture
def limited(model, tmp_path):
    running = Server(model, tmp_path / "data").start("serve.max_sessions=2", "serve.max_body_bytes=100000", "serve.max_samples=1",
                                                     "serve.max_waiting=2", "serve.poll_s=1")
    yield running
    assert running.stop() == 0


def random_value(dice, depth=0):
    kinds = [None, True, -1, 0, 2 ** 63, -2 ** 70, 1e308, "", "../../etc", "\0", "tinker://a:train:0/weights/../x", "é" * 50, [], {}]
    if depth < 3 and dice.random() < 0.3:
        inner = random_value(dice, depth + 1)
        return dice.choice([[inner], {dice.choice(FIELDS): inner}, {"type": "encoded_text", "tokens": [inner]}])
    return dice.choice(kinds)


def test_random_requests_are_refused_and_the_server_goes_on(server):
    dice, caller = random.Random(1), Caller(server)
    for _ in range(ROUNDS):
        path = dice.choice(POSTS)
        value = {name: random_value(dice) for name in dice.sample(FIELDS, dice.randint(0, 8))}
        body = json.dumps(value).encode()
        how = dice.randrange(6)
        headers = {}
        if how == 0:
            body = body[:dice.randrange(len(body) + 1)]
        elif how == 1:
            body = dice.randbytes(dice.randrange(200))
            headers["Content_Type"] = dice.choice(["application/json", "application/x-protobuf", "text/plain", ""])
        elif how == 2:
            body = zstandard.compress(body)
            body = body[:dice.randrange(len(body) + 1)]
            headers["Content_Encoding"] = dice.choice(["zstd", "gzip", "br"])
        status, _, answer = caller.post(path, body, **headers)
        assert status != 500, (path, body, headers, answer)
        assert status < 400 or answer["detail"], (path, body, headers)
    assert caller.run(caller.session()).endswith(":train:0")


@pytest.mark.parametrize("body, encoding, status", [
    (b"[" * 1000 + b"]" * 1000, "identity", 422),
    (b"{}" + b" " * 100001, "identity", 413),
    (zstandard.compress(b" " * (1 << 20)), "zstd", 413),
    (zstandard.compress(b"{}")[:-1], "zstd", 400),
    (b"{}", "br", 415),
])
def test_bodies_beyond_the_limits_get_their_answers(limited, body, encoding, status):
    assert Caller(limited).post("create_session", body, Content_Encoding=encoding)[0] == status


def test_quotas_answer_429_with_retry_after(limited):
    caller = Caller(limited)
    session = caller.session()
    caller.session()
    status, headers, answer = caller.post("create_session", {})
    assert (status, int(headers["Retry-After"]) > 0) == (429, True), answer
    run = caller.run(session)
    step = {"model_id": run, "adam_params": {"learning_rate": 1e-3}}
    for seq in (5, 6):  # both wait for 1 to 4
        assert caller.post("optim_step", step | {"seq_id": seq})[0] == 200
    status, headers, answer = caller.post("optim_step", step | {"seq_id": 7})
    assert (status, int(headers["Retry-After"]) > 0) == (429, True), answer
    sample = {"base_model": NAME, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
              "sampling_params": {"max_tokens": 200, "stop": []}}
    answers = [caller.post("asample", sample) for _ in range(8)]
    refused = [headers for status, headers, _ in answers if status == 429]
    assert refused and all(int(headers["Retry-After"]) > 0 for headers in refused)


def test_repeats_and_unknown_ids(server):
    caller = Caller(server)
    run = caller.run(caller.session())
    step = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
    first, again = caller.post("optim_step", step)[2], caller.post("optim_step", step)[2]
    assert first["request_id"] == again["request_id"]
    assert caller.post("optim_step", step | {"adam_params": {"learning_rate": 2e-3}})[0] == 409
    assert caller.post("retrieve_future", {"request_id": "r-unknown"})[0] in (404, 410)
    assert caller.post("cancel_future", {"request_id": "r-unknown"})[0] == 404
    assert caller.post("get_info", {"model_id": "x:train:0"})[0] == 404
    assert caller.post("session_heartbeat", {"session_id": "x"})[0] == 404
    assert caller.post("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}})[0] == 404


def test_scopes_and_tenants_are_kept_apart(model, tmp_path):
    data = tmp_path / "data"
    ann, bob, reader = key_of(data, "ann", "train,sample"), key_of(data, "bob", "train,sample"), key_of(data, "ann", "read")
    server = Server(model, data).start()
    try:
        owner, other = Caller(server, ann), Caller(server, bob)
        session = owner.session()
        run = owner.run(session)
        path = owner.outcome("save_weights", {"model_id": run, "seq_id": 1, "path": "mine"})["path"]
        sampler = owner.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0,
                                                         "base_model": NAME})[2]["sampling_session_id"]
        promise = owner.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})[2]["request_id"]
        for method, where, body in [
                ("POST", "get_info", {"model_id": run}), ("GET", f"training_runs/{run}", b""), ("GET", f"sessions/{session}", b""),
                ("GET", f"samplers/{sampler}", b""), ("GET", f"training_runs/{run}/checkpoints", b""),
                ("POST", "weights_info", {"tinker_path": path}), ("POST", "retrieve_future", {"request_id": promise}),
                ("POST", "cancel_future", {"request_id": promise}), ("POST", "session_heartbeat", {"session_id": session}),
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
                ("POST", "join_sampling_session", {"sampling_session_id": sampler}),
                ("DELETE", f"training_runs/{run}/checkpoints/weights/mine", b""),
                ("POST", f"training_runs/{run}/checkpoints/weights/mine/publish", b""),
                ("POST", "optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}}),
                ("POST", "save_weights", {"model_id": run, "seq_id": 3, "path": "theirs"}),
                ("POST", "create_model", {"session_id": session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 4}})]:
            status, _, answer = other.call(method, where, body)
            assert status in (404, 410), (where, status, answer)
            assert "ann" not in json.dumps(answer), (where, answer)
        assert other.call("GET", "training_runs")[2]["training_runs"] == []
        assert Caller(server, "tml-wrong").call("GET", "training_runs")[0] == 401
        assert Caller(server, reader).call("GET", f"training_runs/{run}")[0] == 200
        assert Caller(server, reader).post("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}})[0] == 403
        assert owner.call("DELETE", f"training_runs/{run}/checkpoints/weights/mine")[0] == 204
        assert owner.post("weights_info", {"tinker_path": path})[0] == 404
    finally:
        assert server.stop() == 0

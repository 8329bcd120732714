"""Two hostile tenants beside an honest one: they get refusals, and the honest one each bit that it gets without them."""
import json
import random
import socket
import threading

import pytest
import zstandard

from serve.serving import NAME, Server
from serve.test_hostile import Caller, key_of, random_value, FIELDS, POSTS

STEPS = 8
TRAVERSALS = ["..", ".", "../x", "a/../../x", "/etc/x", "a\0b", "a\\..\\b", "%2e%2e", "", "é", "x" * 129, "-" * 4096]
SETTINGS = ["serve.deterministic=true", "serve.max_sessions=4", "serve.max_runs=3", "serve.max_samples=4", "serve.max_waiting=8",
            "serve.max_body_bytes=1000000", "serve.poll_s=2"]


def data(step):
    def datum(seed, length):
        return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [(seed * 31 + 7 * t * t) % 4000 for t in range(length)]}]},
                "loss_fn_inputs": {"target_tokens": {"data": [(seed * 17 + 5 * t) % 4000 for t in range(length)], "dtype": "int64"}}}
    return [datum(3 * step, 9), datum(3 * step + 1, 30)]


def honest_answers(caller):
    """A run of training, what it saved, and everything that its client is told: losses and norms, and what the weights make of a text."""
    session = caller.session()
    run = caller.outcome("create_model", {"session_id": session, "model_seq_id": 0, "base_model": NAME,
                                          "lora_config": {"rank": 4, "seed": 1}})["model_id"]
    answers = []
    for step in range(STEPS):
        work = {"data": data(step), "loss_fn": "cross_entropy"}
        answers.append(caller.outcome("forward_backward", {"model_id": run, "seq_id": 2 * step + 1, "forward_backward_input": work}))
        answers.append(caller.outcome("optim_step", {"model_id": run, "seq_id": 2 * step + 2, "adam_params": {"learning_rate": 1e-2}}))
    saved = caller.outcome("save_weights_for_sampler", {"model_id": run, "seq_id": 2 * STEPS + 1, "path": "mine"})["path"]
    sampler = caller.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0,
                                                      "model_path": saved})[2]["sampling_session_id"]
    # Sampling shares products with others', so that its numbers are the same within a rounding alone.
    sampled = caller.outcome("asample", {
        "sampling_session_id": sampler, "seq_id": 1, "num_samples": 1, "prompt": data(1)[1]["model_input"], "prompt_logprobs": True,
        "sampling_params": {"max_tokens": 4, "seed": 3}})
    return run, saved, answers, sampled["prompt_logprobs"][1:]


class Hostile(threading.Thread):
    """One tenant that tries everything until it is told to end."""

    def __init__(self, caller, seed, victims):
        super().__init__()
        self.caller, self.dice, self.victims = caller, random.Random(seed), victims
        self.ends, self.faults, self.codes, self.slow = threading.Event(), [], {}, []
        self.last = ""

    def run(self):
        tricks = [self.fuzz, self.others, self.names, self.bodies, self.crowd, self.gaps, self.answers, self.dawdle]
        try:
            while not self.ends.is_set():
                self.dice.choice(tricks)()
        except Exception as error:  # what the test is to show, in place of a thread that ends silently
            self.faults.append(f"{self.last}: {error!r}")
        finally:
            for each in self.slow:
                each.close()

    def send(self, method, path, body=b"", **headers):
        self.last = f"{method} {path} {str(body)[:200]}"
        status, _, answer = self.caller.call(method, path, body, **headers)
        self.codes[status] = self.codes.get(status, 0) + 1
        if (status >= 500 and status != 501) or "honest" in json.dumps(answer):
            self.faults.append(f"{self.last}: {status} {answer}")
        return status, answer

    def own_run(self):
        """A run of its own, or none where a limit stands against it."""
        status, answer = self.send("POST", "create_session", {"tags": []})
        if status != 200:
            return None, None
        session = answer["session_id"]
        status, answer = self.send("POST", "create_model", {"session_id": session, "model_seq_id": 0, "base_model": NAME,
                                                            "lora_config": {"rank": self.dice.choice([1, 8, 64])}})
        return session, answer["model_id"] if status == 200 else None

    def finish(self, session):
        if session:
            self.send("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}})

    def fuzz(self):
        value = {name: random_value(self.dice) for name in self.dice.sample(FIELDS, self.dice.randint(0, 8))}
        self.send("POST", self.dice.choice(POSTS), value)

    def others(self):
        run, saved = self.victims["run"], self.victims["saved"]
        if run is None:
            return
        method, path, body = self.dice.choice([
            ("POST", "optim_step", {"model_id": run, "seq_id": self.dice.randint(1, 99), "adam_params": {"learning_rate": 1e6}}),
            ("POST", "forward_backward", {"model_id": run, "seq_id": self.dice.randint(1, 99),
                                          "forward_backward_input": {"data": data(1), "loss_fn": "cross_entropy"}}),
            ("POST", "save_weights", {"model_id": run, "seq_id": self.dice.randint(1, 99), "path": "mine", "overwrite": True}),
            ("POST", "unload_model", {"model_id": run}),
            ("POST", "session_heartbeat", {"session_id": run.split(":")[0]}),
            ("POST", f"sessions/{run.split(':')[0]}/finish", {"reason": {"type": "errored"}}),
            ("POST", "weights_info", {"tinker_path": saved}),
            ("POST", "asample", {"model_path": saved, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                                 "sampling_params": {"max_tokens": 2}}),
            ("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/mine", b""),
            ("POST", f"training_runs/{run}/checkpoints/sampler_weights/mine/publish", b"")])
        status, answer = self.send(method, path, body)
        if status not in (400, 404, 410):
            self.faults.append(f"{self.last}: {status} {answer}")

    def names(self):
        session, run = self.own_run()
        for seq in range(1, 4):
            if run:
                self.send("POST", self.dice.choice(["save_weights", "save_weights_for_sampler", "save_weights_external"]),
                          {"model_id": run, "seq_id": seq, "path": self.dice.choice(TRAVERSALS)})
        self.send("POST", "load_weights", {"path": "tinker://" + self.dice.choice(TRAVERSALS) + "/weights/" + self.dice.choice(TRAVERSALS),
                                           "optimizer": True, "session_id": session or "x", "model_seq_id": 1})
        self.finish(session)

    def bodies(self):
        how = self.dice.randrange(4)
        if how == 0:
            self.send("POST", "create_session", b"[" * 100000 + b"]" * 100000)
        elif how == 1:
            self.send("POST", "forward_backward", zstandard.compress(b" " * (1 << 26)), Content_Encoding="zstd")
        elif how == 2:
            self.send("POST", "forward_backward", self.dice.randbytes(999999), Content_Type="application/x-protobuf")
        else:
            self.send("POST", "asample", {"base_model": NAME, "num_samples": 10 ** 9, "prompt": {"chunks": []}, "sampling_params": {}})

    def crowd(self):
        sessions = [self.send("POST", "create_session", {})[1].get("session_id") for _ in range(6)]
        for session in sessions:
            self.finish(session)

    def gaps(self):
        session, run = self.own_run()
        for seq in range(5, 20):
            if run:
                self.send("POST", "optim_step", {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": float("1e300")}})
        self.finish(session)

    def answers(self):
        for _ in range(6):
            self.send("POST", "asample", {"base_model": NAME, "num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                                          "sampling_params": {"max_tokens": 200, "stop": []}})

    def dawdle(self):
        if len(self.slow) < 100:
            each = socket.create_connection(("127.0.0.1", self.caller.port))
            each.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            self.slow.append(each)


@pytest.fixture
def start(model, tmp_path):
    """Starts a server with keys for the tenants; its callers."""
    started = []

    def begin(name):
        folder = tmp_path / name
        keys = [key_of(folder, tenant, "train,sample") for tenant in ("honest", "mallory", "oscar")]
        server = Server(model, folder).start(*SETTINGS)
        started.append(server)
        return [Caller(server, key) for key in keys], server, folder

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_two_hostile_tenants_change_no_bit_of_an_honest_one(start):
    (alone, *_), server, _ = start("quiet")
    _, _, expected, expected_logprobs = honest_answers(alone)
    assert server.stop() == 0
    assert all("error" not in answer for answer in expected), expected

    (honest, mallory, oscar), server, folder = start("besieged")
    # They know an older run of the honest one, with weights that it saved, and guess the next.
    run, saved, *_ = honest_answers(honest)
    hostile = [Hostile(mallory, 1, {"run": run, "saved": saved}), Hostile(oscar, 2, {"run": run, "saved": saved})]
    for each in hostile:
        each.start()
    try:
        _, _, found, logprobs = honest_answers(honest)
    finally:
        for each in hostile:
            each.ends.set()
        for each in hostile:
            each.join(timeout=60)
    assert found == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    for each in hostile:
        assert not each.is_alive(), each.last
        assert each.faults == []
        assert {200, 404, 413, 422, 429} & set(each.codes) >= {404, 422}, each.codes
    assert server.stop() == 0
    # Nothing lies outside of the tenants' trees, and no name of theirs leads out of them.
    stray = [path for path in folder.parent.rglob("*") if path.name in ("x", "passwd") or path.is_symlink()]
    assert stray == []
    assert {path.name for path in folder.parent.iterdir()} == {"quiet", "besieged"}

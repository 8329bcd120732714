"""Many at once against `heddle serve`: repeats of one request, crowds of sessions, clients that dawdle, and what /metrics says after it."""
import http.client
import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.serving import HEDDLE, NAME, Server
from serve.test_hostile import Caller

DATUM = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
         "loss_fn_inputs": {"target_tokens": {"data": [6, 7, 8], "dtype": "int64"}}}
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_]\w*="(?:\\[\\n"]|[^"\\\n])*",?)*\})? ([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|Inf)|NaN)')


def test_three_of_each_at_once_have_one_promise(server):
    caller = Caller(server)
    session = caller.session()
    run = caller.run(session)
    sampler = caller.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0,
                                                      "base_model": NAME})[2]["sampling_session_id"]
    work = {"data": [DATUM], "loss_fn": "cross_entropy"}
    requests = [
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 4, "seed": 1}}),
        ("forward_backward", {"model_id": run, "seq_id": 1, "forward_backward_input": work}),
        ("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}),
        ("save_weights", {"model_id": run, "seq_id": 3, "path": "kept"}),
        ("save_weights_for_sampler", {"model_id": run, "seq_id": 4, "path": "shown"}),
        ("asample", {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 1, "prompt": DATUM["model_input"],
                     "sampling_params": {"max_tokens": 3, "seed": 1}})]
    for path, body in requests:
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda _: Caller(server).post(path, body), range(3)))
        assert {status for status, _, _ in answers} == {200}, (path, answers)
        assert len({answer["request_id"] for _, _, answer in answers}) == 1, path
        outcome = caller.outcome(path, body)
        assert "error" not in (outcome or {}), (path, outcome)
        assert caller.post(path, body | {"more": None})[0] == 409, path
    assert len(caller.call("GET", f"training_runs/{run}/checkpoints")[2]["checkpoints"]) == 2


def test_a_crowd_of_sessions_is_refused_and_leaves_room_for_others(model, tmp_path):
    data = tmp_path / "data"
    keys = [subprocess.run([HEDDLE, "serve", "keys", "add", "--data-dir", str(data), "--tenant", name], check=True, capture_output=True,
                           text=True).stdout.split()[-1] for name in ("greedy", "modest")]
    server = Server(model, data).start("serve.max_sessions=20")
    try:
        with ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(lambda _: Caller(server, keys[0]).post("create_session", {"tags": []})[0], range(400)))
        assert codes.count(200) == 20 and codes.count(429) == 380
        modest = Caller(server, keys[1])
        assert modest.run(modest.session()).endswith(":train:0")
    finally:
        assert server.stop() == 0


def test_clients_that_dawdle_keep_nobody_waiting(server):
    slow = []
    try:
        for i in range(300):
            each = socket.create_connection(("127.0.0.1", int(server.port)))
            each.sendall((b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n" + (b"\r\n{" if i % 2 else b"X-A"))[:90])
            slow.append(each)
        begin = time.monotonic()
        caller = Caller(server)
        for _ in range(20):
            assert caller.call("GET", "healthz")[0] == 200
        caller.session()
        assert time.monotonic() - begin < 20
    finally:
        for each in slow:
            each.close()


def test_metrics_are_text_that_prometheus_reads(server):
    connection = http.client.HTTPConnection("127.0.0.1", int(server.port), timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({"model": NAME, "prompt": [5, 6], "max_tokens": 3}),
                       {"Content-Type": "application/json"})
    assert connection.getresponse().read()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    assert text.endswith("\n")
    types, buckets, counts = {}, {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in types and kind in ("counter", "gauge", "histogram"), line
            types[name] = kind
        if line.startswith("#"):
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, labels, value = found.groups()
        family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in types else name
        assert family in types, line
        # Each set of labels but the bucket's own is a histogram.
        series = (family, tuple(sorted(re.findall(r'(\w+)="([^"]*)"', re.sub(r'\ble="[^"]*"', "", labels or "")))))
        if name.endswith("_bucket"):
            buckets.setdefault(series, []).append((re.search(r'\ble="([^"]*)"', labels).group(1), float(value)))
        elif name.endswith("_count") and types[family] == "histogram":
            counts[series] = float(value)
    assert types["vllm:time_to_first_token_seconds"] == "histogram" and buckets
    for kind in ("prompt", "decode"):
        assert re.search(r'^heddle_passes_total\{kind="%s",queued="launched"\} [1-9]' % kind, text, re.M), text
    assert types["heddle_pass_adapter_sets"] == "histogram" and types["heddle_queue_depth"] == "gauge"
    for series, rows in buckets.items():
        assert rows[-1] == ("+Inf", counts[series]), series
        assert [count for _, count in rows] == sorted(count for _, count in rows), series


@pytest.mark.parametrize("path", ["/admin", "/admin/content", "/admin/state.json"])
def test_the_page_shows_what_was_trained(server, path):
    caller = Caller(server)
    run = caller.run(caller.session())
    caller.outcome("forward_backward", {"model_id": run, "seq_id": 1,
                                        "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}})
    caller.outcome("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}})
    connection = http.client.HTTPConnection("127.0.0.1", int(server.port), timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200 and run in text, text[:500]

"""Load: 2,000 parked polls and 500 streams at once keep nobody waiting, each is answered, and the memory stays small; requests over cut
connections and kills are neither lost, doubled nor reordered.
"""
import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from serve.serving import HEDDLE, NAME, ROOT, Server
from serve.test_hostile import Caller

POLLS, STREAMS, POLL_S = 2000, 500, 20
MOST_KB = 300 * 1024  # over the model
BODY = 64 << 20


def status_of(process, field):
    for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise AssertionError(field)


async def post(port, path, body):
    """The connection after the request went out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-local\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def answer(port, path, body):
    """Status and what came until the server closed."""
    reader, writer = await post(port, path, body)
    head = await reader.readuntil(b"\r\n\r\n")
    content = await reader.read()
    writer.close()
    return int(head.split()[1]), content


@pytest.fixture
def roomy(model, tmp_path):
    running = Server(model, tmp_path / "data").start(f"serve.poll_s={POLL_S}", "serve.max_samples=1000", f"serve.max_body_bytes={BODY}")
    yield running
    assert running.stop() == 0


def test_parked_polls_and_streams_keep_nobody_waiting(roomy):
    port, caller = int(roomy.port), Caller(roomy)
    run = caller.run(caller.session())
    # Waits for a seq_id that does not come.
    promise = caller.post("optim_step", {"model_id": run, "seq_id": 9, "adam_params": {}})[2]["request_id"]
    before = status_of(roomy.process, "VmRSS")

    async def crowd():
        begin = time.monotonic()
        polls = [asyncio.create_task(answer(port, "/api/v1/retrieve_future", {"request_id": promise})) for _ in range(POLLS)]
        streams = [asyncio.create_task(answer(port, "/v1/completions", {"model": NAME, "prompt": [5, 6, i % 4000], "max_tokens": 8,
                                                                        "stream": True, "ignore_eos": True})) for i in range(STREAMS)]
        delays = []
        while not all(task.done() for task in streams):
            start = time.monotonic()
            status, _ = await answer(port, "/api/v1/client/config", {"sdk_version": "0.38.0"})
            delays.append(time.monotonic() - start)
            assert status == 200
            await asyncio.sleep(0.05)
        streamed = await asyncio.gather(*streams)
        polled = await asyncio.gather(*polls)
        return streamed, polled, delays, time.monotonic() - begin

    streamed, polled, delays, seconds = asyncio.run(crowd())
    for status, content in streamed:
        assert status == 200 and b'"finish_reason":"length"' in content and b"data: [DONE]\n\n" in content, content[-300:]
    for status, content in polled:
        assert status == 200 and b'"try_again"' in content, (status, content[:200])
    grown = status_of(roomy.process, "VmHWM") - before
    print(f"{POLLS} polls and {STREAMS} streams in {seconds:.1f} s, {grown // 1024} MB more; another request beside them: "
          f"median {sorted(delays)[len(delays) // 2] * 1e3:.1f} ms, most {max(delays) * 1e3:.1f} ms")
    assert grown < MOST_KB, f"{grown} KB"
    assert sorted(delays)[len(delays) // 2] < 1


def test_the_largest_body_is_read_and_one_byte_more_is_not(roomy):
    caller = Caller(roomy)
    run = caller.run(caller.session())
    before = status_of(roomy.process, "VmRSS")
    begin, end = (f'{{"model_id": "{run}", "seq_id": 1, "forward_backward_input": {{"loss_fn": "cross_entropy", "data": [{{"model_input": '
                  '{"chunks": [{"type": "encoded_text", "tokens": [1'), "]}]}}]}}"
    tokens = ",1234" * ((BODY - len(begin) - len(end)) // 5)
    body = (begin + tokens + end).encode().ljust(BODY)
    refused = caller.outcome("forward_backward", body)
    assert refused["error"] == "the body is no JSON: there are more than 4000000 values in it"
    longer = body.replace(b'"seq_id": 1', b'"seq_id": 2') + b" "
    assert caller.outcome("forward_backward", longer)["error"] == f"the body has {BODY + 1} bytes: {BODY} are allowed"
    grown = status_of(roomy.process, "VmHWM") - before
    print(f"a body of {BODY >> 20} MiB: {grown // 1024} MB more")
    assert grown < MOST_KB, f"{grown} KB"
    assert caller.post("forward_backward", b" " * (2 * BODY + 1))[0] == 413
    assert caller.call("GET", "healthz")[0] == 200


def test_kills_and_cut_connections_lose_double_and_reorder_nothing():
    """A fiftieth of what the script does by hand: --requests 100000 --kills 3 --steps 20."""
    subprocess.run([sys.executable, ROOT / "scripts/kill-server", "--requests", "2000", "--kills", "2"], check=True,
                   env=os.environ | {"HEDDLE": HEDDLE})

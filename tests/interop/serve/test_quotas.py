"""Quotas of `heddle serve` as the real clients meet them: openai is told and waits, the tinker SDK waits and goes on.

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve/test_quotas.py
"""
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tinker
from tinker import types

from serve.serving import HEDDLE, NAME, Server
from serve.test_tinker import TOKENS, client, datum


@pytest.fixture
def quotas(model, tmp_path):
    """Starts a server; quotas(settings..., **limits of the key) gives it and a key."""
    running = []

    def start(*settings, **limits):
        data = tmp_path / "data"
        options = [part for name, value in limits.items() for part in ("--" + name.replace("_", "-"), str(value))]
        made = subprocess.run([HEDDLE, "serve", "keys", "add", "--data-dir", str(data), "--tenant", "ann", *options], check=True,
                              capture_output=True, text=True)
        listed = subprocess.run([HEDDLE, "serve", "keys", "list", "--data-dir", str(data)], check=True, capture_output=True, text=True)
        assert all(f"{name}={value}" in listed.stdout for name, value in limits.items())
        running.append(Server(model, data).start("serve.poll_s=1", *settings))
        return running[0], made.stdout.split()[-1]

    yield start
    assert running[0].stop() == 0


def open_ai(server, key, retries=0):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=retries)


def complete(api, **more):
    return api.completions.with_raw_response.create(**{"model": NAME, "prompt": [5, 6, 7], "max_tokens": 4, **more})


def test_requests_a_minute(quotas):
    server, key = quotas("serve.requests_per_minute=2")
    api = open_ai(server, key)
    assert complete(api).headers["x-ratelimit-remaining-requests"] == "1"
    complete(api)
    with pytest.raises(openai.RateLimitError) as caught:
        complete(api)
    assert caught.value.code == "rate_limit_exceeded" and caught.value.body["type"] == "rate_limit_error"
    headers = caught.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 30 and headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-reset-requests"].endswith("s")


def test_openai_waits_as_long_as_it_is_told(quotas):
    server, key = quotas(requests_per_minute=60)
    api = open_ai(server, key, retries=3)
    begin = time.monotonic()
    for _ in range(63):
        complete(api, max_tokens=1)
    assert time.monotonic() - begin > 1


def test_tokens_a_minute_are_paid_back(quotas):
    server, key = quotas(tokens_per_minute=600)
    api = open_ai(server, key)
    # Forty tokens too many: they are back after four seconds, whatever of these the answer took.
    assert complete(api, prompt=[5] * 200, n=8, max_tokens=55, extra_body={"ignore_eos": True}).headers[
        "x-ratelimit-limit-tokens"] == "600"
    with pytest.raises(openai.RateLimitError, match="600 tokens a minute") as caught:
        complete(api)
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    time.sleep(int(caught.value.response.headers["retry-after"]))
    complete(api)


def test_answers_under_way(quotas):
    server, key = quotas(max_concurrent=1)
    api = open_ai(server, key)
    for _ in range(20):  # one after another never meets the limit
        complete(api, max_tokens=1)
    stream = api.completions.create(model=NAME, prompt=[5, 6], max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    with pytest.raises(openai.RateLimitError, match="under way"):
        complete(api)
    stream.close()
    with ThreadPoolExecutor(4) as pool:  # a client that waits gets through
        waiting = open_ai(server, key, retries=10)
        assert all(list(pool.map(lambda _: complete(waiting, max_tokens=8).status_code == 200, range(4))))


def test_the_sdk_waits_for_its_rate_and_loses_nothing(quotas):
    server, key = quotas(requests_per_minute=60, max_concurrent=2)
    service = client(server, key)
    run = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    # More than a minute's bucket: the SDK backs off and sends the rest later, in its order.
    work = [run.forward_backward([datum()], "cross_entropy") for _ in range(62)]
    step = run.optim_step(types.AdamParams(learning_rate=1e-3))
    losses = {each.result().metrics["loss:sum"] for each in work}
    assert len(losses) == 1 and step.result().metrics["grad_norm:mean"] > 0
    sampler = run.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=3, temperature=0, stop=[])
    asked = [sampler.sample(types.ModelInput.from_ints(TOKENS[:3]), 1, greedy) for _ in range(6)]
    assert len({tuple(each.result().sequences[0].tokens) for each in asked}) == 1


def test_the_sdk_waits_until_runs_and_disk_are_free(quotas):
    server, key = quotas("serve.max_runs=1", max_disk_bytes=1)
    first, second = client(server, key), client(server, key)
    run = first.create_lora_training_client(base_model=NAME, rank=4).result()
    path = run.save_state("a").result().path
    waiting = run.save_state("b")
    time.sleep(1)
    first.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    assert waiting.result().path.endswith("/weights/b")
    timer = threading.Timer(1, lambda: first.close("success").result())
    timer.start()
    other = second.create_lora_training_client(base_model=NAME, rank=4).result()
    timer.join()
    assert other.get_info().model_data.model_name == NAME
    assert isinstance(other, tinker.TrainingClient)

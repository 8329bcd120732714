"""kill -9 at random moments under load: no promise is lost, and every client's losses have the bits of an undisturbed run.

    HEDDLE_KILLS=30 python -m pytest tests/interop/serve/test_kills.py    # by hand; CI kills twice
"""
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from serve.serving import NAME
from serve.test_tinker import client, train

KILLS = int(os.environ.get("HEDDLE_KILLS", "2"))
CLIENTS = 10
STEPS = 3 + 2 * KILLS


def test_clients_go_on_over_kills_as_if_nothing_had_happened(server):
    dice = random.Random(KILLS)
    assert server.stop() == 0
    settings = "serve.durable_steps=2", "serve.deterministic=true"
    server.start(*settings)

    def new_run():
        return client(server).create_lora_training_client(base_model=NAME, rank=8, seed=5)

    expected = train(new_run(), STEPS)
    runs = [new_run() for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        work = [pool.submit(train, run, STEPS) for run in runs]
        struck = 0
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.1, 1.0))
            struck += not all(each.done() for each in work)
            server.stop(signal.SIGKILL)
            server.start(*settings)
        assert [each.result() for each in work] == [expected] * CLIENTS
    assert struck  # a kill after the last step would show nothing

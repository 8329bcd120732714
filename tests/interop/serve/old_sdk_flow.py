"""What programs of older tinker SDKs do, for test_old_sdks.py: python old_sdk_flow.py URL BASE_MODEL, with an SDK on the path."""
import sys

import tinker
from tinker import types

TOKENS = [11, 7, 301, 45, 1200, 9, 77, 300]


def of(value):
    """Some versions return a future where others return the value."""
    return value.result() if hasattr(value, "result") else value


def datum():
    targets = TOKENS[1:]
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                       loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)})


def main(url, base):
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    assert [each.model_name for each in of(service.get_server_capabilities()).supported_models] == [base]
    run = of(service.create_lora_training_client(base_model=base, rank=8, seed=3))
    assert of(run.get_info()).model_data.model_name == base
    losses = []
    for _ in range(25):
        work = run.forward_backward([datum()] * 3, "cross_entropy")
        step = run.optim_step(types.AdamParams(learning_rate=3e-3))
        output = work.result()
        assert len(output.loss_fn_outputs) == 3
        losses.append(output.metrics["loss:sum"] / 3 / (len(TOKENS) - 1))
        step.result()
    assert losses[0] > 5 and losses[-1] < 0.1, losses
    logprobs = list(run.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
    assert abs(-sum(logprobs) / len(logprobs) - losses[-1]) < 0.05

    # A call in several requests, of which one is refused: the client's next ones go on.
    wrong = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [10 ** 6], "weights": [1.0]})
    work, step = run.forward_backward([datum()] * 1500 + [wrong] * 2, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=0))
    step.result(timeout=60)
    try:
        raise AssertionError(work.result(timeout=60))
    except tinker.RequestFailedError as error:
        assert "token 1000000" in str(error), error

    saved = run.save_state("kept").result().path
    again = of(service.create_training_client_from_state(saved))
    assert list(again.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data) == logprobs

    sampler = of(run.save_weights_and_get_sampling_client(name="now"))
    greedy = types.SamplingParams(max_tokens=len(TOKENS) - 2, temperature=0, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(TOKENS[:2]), 2, greedy).result()
    assert [list(each.tokens) for each in answer.sequences] == [TOKENS[2:]] * 2
    assert all(each.stop_reason == "length" and len(each.logprobs) == len(TOKENS) - 2 for each in answer.sequences)
    told = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert told[0] is None and max(abs(a - b) for a, b in zip(told[1:], logprobs)) < 0.05

    rest = service.create_rest_client()
    ids = {each.checkpoint_id for each in of(rest.list_checkpoints(run.model_id)).checkpoints}
    assert "weights/kept" in ids, ids
    print("tinker", tinker.__version__, "done")


main(*sys.argv[1:])

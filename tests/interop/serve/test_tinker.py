"""The tinker SDK against `heddle serve`: trains, saves, loads and samples as its users do.

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve
"""
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import warnings

import numpy
import peft
import pytest
import safetensors.torch
import tinker
import torch
import transformers
from tinker import types

from serve.serving import HEDDLE, NAME, ROOT, Server

warnings.simplefilter("ignore")
TOKENS = [11, 7, 301, 45, 1200, 9, 77, 300, 12, 5, 610, 8]
KEY = "tml-local"
NATS_OF_A_SNAPSHOT = 0.02  # between the trainer's log-probabilities and the sampler's
ANSWER_S = 60  # a request that is not answered by then is never answered


def client(server, key=KEY):
    return tinker.ServiceClient(base_url=server.url, api_key=key)


def datum(tokens=TOKENS, weights=None):
    targets = tokens[1:]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]),
                       loss_fn_inputs={"target_tokens": targets, "weights": weights or [1.0] * len(targets)})


def train(run, steps, lr=3e-3):
    """Mean loss of a token before each step."""
    losses = []
    for _ in range(steps):
        work = run.forward_backward([datum()], "cross_entropy")
        step = run.optim_step(types.AdamParams(learning_rate=lr))
        losses.append(work.result().metrics["loss:sum"] / (len(TOKENS) - 1))
        step.result()
    return losses


def logprobs_of(run):
    return numpy.array(run.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


def test_trains_saves_loads_and_recites(server):
    service = client(server)
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    assert names == [NAME]
    run = service.create_lora_training_client(base_model=NAME, rank=16, seed=3).result()
    assert run.get_info().model_data.model_name == NAME
    losses = train(run, 30)
    assert losses[0] > 5 and losses[-1] < 0.05, losses

    # Chunks of one call, sent together: sums over all of them.
    many = run.forward_backward([datum()] * 2500, "cross_entropy").result()
    assert len(many.loss_fn_outputs) == 2500
    one = run.forward([datum()], "cross_entropy").result()
    assert many.metrics["loss:sum"] == pytest.approx(2500 * one.metrics["loss:sum"], rel=1e-4)
    run.optim_step(types.AdamParams(learning_rate=0)).result()

    saved = run.save_state("a").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    numpy.testing.assert_array_equal(logprobs_of(run), logprobs_of(again))
    assert train(run, 3) == train(again, 3)

    sampler = run.save_weights_and_get_sampling_client().result()
    told = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert told[0] is None
    assert numpy.abs(numpy.array(told[1:]) - logprobs_of(run)).mean() < NATS_OF_A_SNAPSHOT
    greedy = types.SamplingParams(max_tokens=len(TOKENS) - 2, temperature=0, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(TOKENS[:2]), 1, greedy).result().sequences[0]
    assert answer.tokens == TOKENS[2:] and answer.stop_reason == "length"

    # A snapshot does not change with the run.
    named = run.save_weights_for_sampler("named").result().path
    train(run, 2, lr=1e-1)
    snapshot = service.create_sampling_client(model_path=named).result()
    answer = snapshot.sample(types.ModelInput.from_ints(TOKENS[:2]), 1, greedy).result().sequences[0]
    assert answer.tokens == TOKENS[2:]
    base = service.create_sampling_client(base_model=NAME).result()
    drawn = base.sample(types.ModelInput.from_ints(TOKENS[:2]), 3, types.SamplingParams(max_tokens=5, seed=1, stop=[])).result()
    assert [len(each.tokens) for each in drawn.sequences] == [5, 5, 5]

    rest = service.create_rest_client()
    runs = rest.list_training_runs().result()
    assert {each.training_run_id for each in runs.training_runs} == {run.model_id, again.model_id}
    checkpoints = rest.list_checkpoints(run.model_id).result().checkpoints
    assert {each.checkpoint_id for each in checkpoints} >= {"weights/a", "sampler_weights/named"}
    rest.delete_checkpoint_from_tinker_path(saved).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(saved).result()
    service.close("success").result()


def test_the_program_of_the_docs(tmp_path):
    model = tmp_path / "small"
    subprocess.run([HEDDLE, "init", "--preset", "small-2m", "--tokenizer", str(ROOT / "examples/tokenizer-4k"), "--output", str(model),
                    "--seed", "1"], check=True, capture_output=True)
    program = re.search("```python\n(.*?)```", (ROOT / "docs/serve.md").read_text(), re.DOTALL).group(1)
    server = Server(model, tmp_path / "data").start()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program.replace("http://127.0.0.1:8000", server.url), {})
    assert server.stop() == 0
    loss, recited, other_loss, other = out.getvalue().splitlines()
    assert float(loss.split()[1]) < 0.1 and float(other_loss.split()[1]) < 0.1, out.getvalue()
    assert (recited, other) == ("[301, 45, 1200, 9]", "[77, 300, 12, 5]")


def test_gradients_add_up_and_weights_multiply(server):
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    other = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    half = [0.5] * (len(TOKENS) - 1)
    norms = []
    for each, calls in ((run, [[datum()]]), (other, [[datum(weights=half)], [datum(weights=half)]])):
        for data in calls:
            each.forward_backward(data, "cross_entropy").result()
        norms.append(each.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm:mean"])
    assert norms[0] > 0 and norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_weights_are_downloaded(server, tmp_path):
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    external = run.save_weights_external("mine").result().path
    told = service.create_rest_client().get_external_weights_urls(external).result()
    files = {name: urllib.request.urlopen(url).read() for name, url in told.urls.items()}
    assert json.loads(files["adapter_config.json"])["r"] == 4
    # As the SDK's own command has it: of a training checkpoint, by way of a run of its own.
    saved, fetched = run.save_state("kept").result().path, tmp_path / "fetched"
    done = subprocess.run([sys.executable, "-m", "tinker.cli", "checkpoint", "download", saved, "--output", str(fetched)],
                          env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.read_bytes() for each in fetched.rglob("adapter_model.safetensors")] == [files["adapter_model.safetensors"]]


def peft_logprobs(model, folder):
    """What transformers and PEFT say of TOKENS."""
    adapted = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder)
    with torch.no_grad():
        logits = adapted(torch.tensor([TOKENS[:-1]])).logits[0]
    return torch.log_softmax(logits, -1)[torch.arange(len(TOKENS) - 1), TOKENS[1:]].numpy()


def test_the_head_is_trained_unless_told_otherwise_and_peft_reads_it(server, tmp_path):
    service = client(server)
    kinds = {"usual": {}, "head": {"train_attn": False, "train_mlp": False}, "others": {"train_unembed": False}}
    for kind, options in kinds.items():
        run = service.create_lora_training_client(base_model=NAME, rank=8, seed=3, **options).result()
        losses = train(run, 12, lr=1e-2)
        assert losses[-1] < losses[0] - 0.5, (kind, losses)
        urls = service.create_rest_client().get_external_weights_urls(run.save_weights_external(kind).result().path).result().urls
        folder = tmp_path / kind
        folder.mkdir()
        for name, url in urls.items():
            (folder / name).write_bytes(urllib.request.urlopen(url).read())
        names = set(safetensors.torch.load_file(folder / "adapter_model.safetensors"))
        on_head = {name for name in names if "lm_head" in name}
        assert (len(on_head), names == on_head) == {"usual": (2, False), "head": (2, True), "others": (0, False)}[kind], names
        told = logprobs_of(run)
        numpy.testing.assert_allclose(peft_logprobs(server.model, folder), told, atol=2e-4)
        sampler = run.save_weights_and_get_sampling_client().result()
        sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
        assert numpy.abs(numpy.array(sampled[1:]) - told).mean() < NATS_OF_A_SNAPSHOT


def test_an_adapter_of_peft_on_the_head_is_served(model, tmp_path):
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(tmp_path / "head")
    file = tmp_path / "head/adapter_model.safetensors"
    assert any("lm_head.base_layer" in name for name in safetensors.torch.load_file(file))  # PEFT writes the base model's table too
    server = Server(model, tmp_path / "data").start("--adapter", f"head={tmp_path / 'head'}")
    ask = urllib.request.Request(server.url + "/v1/completions", headers={"Content-Type": "application/json"}, data=json.dumps(
        {"model": "head", "prompt": TOKENS, "max_tokens": 1, "echo": True, "logprobs": 0}).encode())
    told = json.load(urllib.request.urlopen(ask))["choices"][0]["logprobs"]["token_logprobs"][1:len(TOKENS)]
    assert server.stop() == 0
    numpy.testing.assert_allclose(told, peft_logprobs(model, tmp_path / "head"), atol=2e-4)
    tensors = safetensors.torch.load_file(file)
    tensors["base_model.model.lm_head.base_layer.weight"] += 1
    safetensors.torch.save_file(tensors, file)
    done = subprocess.run([HEDDLE, "serve", str(model), "--port", "0", "--data-dir", str(tmp_path / "data"), "--adapter",
                           f"head={tmp_path / 'head'}", "device.name=cpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "base_model.model.lm_head.base_layer.weight" in done.stderr, done.stderr


def test_only_the_end_of_a_prompt_is_scored(server):
    sampler = client(server).create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(TOKENS)
    whole = sampler.compute_logprobs(prompt).result()
    end = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert end[:-3] == [None] * (len(TOKENS) - 3) and end[-3:] == whole[-3:]
    # Chosen tokens have the log-probabilities that the prompt's own, and the most likely ones, are told.
    for sparse in (False, True):
        ids = torch.full((len(TOKENS) - 1, 2), -1)
        ids[:, 0] = torch.tensor(TOKENS[1:])
        ids[4, 1] = TOKENS[3]
        targets = types.TensorData.from_torch_sparse(ids, pad_value=-1) if sparse else types.TensorData.from_torch(ids)
        told = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=targets).result()
        found = told.target_prompt_logprobs.to_torch()
        numpy.testing.assert_allclose(found[:, 0], whole[1:], atol=1e-5)
        other = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS[:5] + [TOKENS[3]])).result()
        assert abs(float(found[4, 1]) - other[-1]) < 1e-5
    metrics = urllib.request.urlopen(server.url + "/metrics").read().decode()
    assert 'vllm:request_success_total{finished_reason="length"' in metrics


def test_alternatives_are_drawn_in_the_places_of_a_prompt(server):
    sampler = client(server).create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(TOKENS)
    told = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1, seed=4), prompt_alt_tokens_k=3, topk_prompt_logprobs=1).result()
    ids, logprobs = told.prompt_alt_tokens.tokens.to_torch(), told.prompt_alt_tokens.logprobs.to_torch()
    assert ids.shape == logprobs.shape == (len(TOKENS) - 1, 3) and len(set(ids.flatten().tolist())) > 3
    again = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=types.TensorData.from_torch(ids)).result()
    numpy.testing.assert_allclose(again.target_prompt_logprobs.to_torch(), logprobs, atol=1e-5)
    greedy = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1, temperature=0), prompt_alt_tokens_k=2,
                            topk_prompt_logprobs=1).result()
    best = [row[0][0] for row in greedy.topk_prompt_logprobs[1:]]
    assert greedy.prompt_alt_tokens.tokens.to_torch().tolist() == [[each, each] for each in best]


def soft_datum(targets, weights, sparse):
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                       loss_fn_inputs={"target_tokens": make(targets), "weights": make(weights)})


def test_soft_targets_weigh_several_tokens_in_a_place(server):
    service = client(server)
    run, other = (service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result() for _ in range(2))
    places, width = len(TOKENS) - 1, 4
    targets = torch.arange(places * width).reshape(places, width) * 7 % 900 + 1
    weights = torch.linspace(-1, 2, places * width).reshape(places, width)
    soft = run.forward_backward([soft_datum(targets, weights, False), datum()], "cross_entropy").result()
    assert soft.loss_fn_outputs[0]["logprobs"].shape == [places, width] and soft.loss_fn_outputs[1]["logprobs"].shape == [places]
    hard = [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                        loss_fn_inputs={"target_tokens": targets[:, k].tolist(), "weights": weights[:, k].tolist()}) for k in range(width)]
    sums = other.forward_backward(hard + [datum()], "cross_entropy").result()
    assert soft.metrics["loss:sum"] == pytest.approx(sums.metrics["loss:sum"], rel=1e-4)
    found = soft.loss_fn_outputs[0]["logprobs"].to_torch()
    for k in range(width):
        numpy.testing.assert_allclose(found[:, k], sums.loss_fn_outputs[k]["logprobs"].data, atol=1e-4)
    norms = [each.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm:mean"] for each in (run, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    # As CSR matrices, which hold the cells alone that have a target.
    targets[weights < 1.5] = 0
    weights[weights < 1.5] = 0
    sparse = soft_datum(targets, weights, True)
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    told = run.forward([sparse], "cross_entropy").result()
    hard = [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                        loss_fn_inputs={"target_tokens": targets[:, k].tolist(), "weights": weights[:, k].tolist()}) for k in range(width)]
    assert told.metrics["loss:sum"] == pytest.approx(run.forward(hard, "cross_entropy").result().metrics["loss:sum"], rel=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="takes one target a token"):
        run.forward([types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(targets), "logprobs": types.TensorData.from_torch(weights),
            "advantages": types.TensorData.from_torch(weights)})], "ppo").result()


def test_user_errors_reach_the_user(server):
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="loss_fn=importance_sampling"):
        run.forward_backward([datum()], "stable_reinforce").result()
    # A call in several requests, of which one is refused: the client's next ones go on.
    wrong = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": [10 ** 6] * (len(TOKENS) - 1)})
    for place in (0, 1500):
        many = [datum()] * 2100
        many[place] = wrong
        work, step = run.forward_backward(many, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=0))
        assert "grad_norm:mean" in step.result(timeout=ANSWER_S).metrics
        with pytest.raises(tinker.RequestFailedError, match="token 1000000"):
            work.result(timeout=ANSWER_S)
    with pytest.raises(tinker.BadRequestError, match="not served here"):
        service.create_lora_training_client(base_model="other/model", rank=4).result()


def test_a_datum_that_is_too_large_fails_and_keeps_nothing_waiting(server):
    assert server.stop() == 0
    server.start("serve.max_body_bytes=100000")
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4).result()
    large = types.Datum(model_input=types.ModelInput.from_ints([1] * 9000), loss_fn_inputs={"target_tokens": [1] * 9000})
    for data in ([large], [datum()] * 500 + [large] + [datum()] * 500):
        work, step = run.forward_backward(data, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=0))
        assert "grad_norm:mean" in step.result(timeout=ANSWER_S).metrics
        with pytest.raises(tinker.RequestFailedError, match="100000 are allowed"):
            work.result(timeout=ANSWER_S)
    assert run.forward_backward([datum()] * 1000, "cross_entropy").result(timeout=ANSWER_S)


def test_a_call_in_several_requests_on_a_run_that_is_gone(server):
    run = client(server).create_lora_training_client(base_model=NAME, rank=4).result()
    assert server.stop() == 0
    server.start()
    work, step = run.forward_backward([datum()] * 1500, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=0))
    for future in (work, step):
        with pytest.raises(tinker.RequestFailedError, match="is not in memory"):
            future.result(timeout=ANSWER_S)


def test_two_tenants_and_a_restart(server):
    assert server.stop() == 0
    keys = [subprocess.run([HEDDLE, "serve", "keys", "add", "--data-dir", str(server.data), "--tenant", name], check=True,
                           capture_output=True, text=True).stdout.splitlines()[-1] for name in ("ann", "bob")]
    server.start()
    first, second = (client(server, key) for key in keys)
    runs = [each.create_lora_training_client(base_model=NAME, rank=rank, seed=2).result() for each, rank in ((first, 4), (second, 16))]
    work = [run.forward_backward([datum()], "cross_entropy") for run in runs]
    steps = [run.optim_step(types.AdamParams(learning_rate=1e-2)) for run in runs]
    assert all(each.result() for each in work + steps)
    saved = runs[0].save_state("kept").result().path
    with pytest.raises(tinker.NotFoundError):
        second.create_training_client_from_state(saved).result()
    with pytest.raises(tinker.AuthenticationError):
        client(server, "tml-guessed").create_lora_training_client(base_model=NAME, rank=4).result()
    before = logprobs_of(runs[0])
    server.stop(signal.SIGKILL)
    server.start()
    again = client(server, keys[0]).create_training_client_from_state_with_optimizer(saved).result()
    numpy.testing.assert_array_equal(before, logprobs_of(again))


def test_a_killed_server_loses_no_promise_with_durable_steps(server):
    assert server.stop() == 0
    settings = "serve.durable_steps=2", "serve.deterministic=true"
    server.start(*settings)
    service = client(server)
    whole, cut = (service.create_lora_training_client(base_model=NAME, rank=8, seed=5).result() for _ in range(2))
    expected = train(whole, 8)
    losses = train(cut, 1)
    early = cut.save_weights_and_get_sampling_client().result()  # lies in the state after the second step
    losses += train(cut, 2)
    late = cut.save_weights_and_get_sampling_client().result()  # made again
    said = [each.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result() for each in (early, late)]
    work = cut.forward_backward([datum()], "cross_entropy")
    step = cut.optim_step(types.AdamParams(learning_rate=3e-3))
    server.stop(signal.SIGKILL)
    server.start(*settings)
    losses.append(work.result().metrics["loss:sum"] / (len(TOKENS) - 1))
    step.result()
    assert [each.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result() for each in (early, late)] == said
    assert losses + train(cut, 4) == expected

"""Runs of a mixture of experts: the experts of a layer share a factor, as on Tinker, or have a pair each; PEFT reads both."""
import os
import signal
import subprocess
import sys
import urllib.request

import numpy
import pytest
import safetensors.torch
import torch
from tinker import types

from serve.serving import HEDDLE, NAME, ROOT, Server
from serve.test_tinker import KEY, NATS_OF_A_SNAPSHOT, TOKENS, client, logprobs_of, peft_logprobs, train

EXPERTS, HIDDEN, WIDTH = 8, 256, 256  # of small-moe


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    subprocess.run([HEDDLE, "init", "--preset", "small-moe", "--tokenizer", str(ROOT / "examples/tokenizer-4k"), "--output", str(folder),
                    "--seed", "1", "--dtype", "float32"], check=True, capture_output=True)
    return folder


def downloaded(service, run, name, folder):
    urls = service.create_rest_client().get_external_weights_urls(run.save_weights_external(name).result().path).result().urls
    folder.mkdir()
    for file, url in urls.items():
        (folder / file).write_bytes(urllib.request.urlopen(url).read())
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def experts_have_one(factor, dim):
    """A has the experts outer, B inner."""
    parts = factor.chunk(EXPERTS, 0) if dim == 0 else factor.view(factor.shape[0], -1, EXPERTS).unbind(2)
    return all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.parametrize("shared", [True, False])
def test_peft_says_what_a_run_of_experts_says(mixture, tmp_path, shared):
    settings = ("serve.durable_steps=2", "serve.deterministic=true", *([] if shared else ["serve.shared_expert_factors=false"]))
    server = Server(mixture, tmp_path / "data").start(*settings)
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4, seed=3, train_unembed=False).result()
    losses = train(run, 6, lr=1e-2)
    assert losses[-1] < losses[0] - 0.5, losses
    tensors = downloaded(service, run, "mine", tmp_path / "peft")
    down = [name for name in tensors if ".experts." in name and name.endswith("lora_B.weight") and tensors[name].shape[0] == HIDDEN]
    gate_up = [name for name in tensors if ".experts." in name and name.endswith("lora_B.weight") and tensors[name].shape[0] == 2 * WIDTH]
    assert len(down) == len(gate_up) > 0
    for name in gate_up:
        assert experts_have_one(tensors[name.replace("lora_B", "lora_A")], 0) == shared, name
        assert not experts_have_one(tensors[name], 1)
    for name in down:
        assert experts_have_one(tensors[name], 1) == shared, name
        assert not experts_have_one(tensors[name.replace("lora_B", "lora_A")], 0)
    told = logprobs_of(run)
    numpy.testing.assert_allclose(peft_logprobs(mixture, tmp_path / "peft"), told, atol=2e-4)
    sampler = run.save_weights_and_get_sampling_client().result()
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert numpy.abs(numpy.array(sampled[1:]) - told).mean() < NATS_OF_A_SNAPSHOT

    # The server's own files have a shared factor once; what is downloaded of them has PEFT's form.
    kept, trained = run.save_weights_for_sampler("kept").result().path, run.save_state("trained").result().path
    assert service.create_sampling_client(model_path=kept).result().compute_logprobs(types.ModelInput.from_ints(TOKENS)).result() == sampled
    sizes = {each.checkpoint_id: each.size_bytes for each in service.create_rest_client().list_checkpoints(run.model_id).result().checkpoints}
    assert (sizes["sampler_weights/kept"] < sizes["external_weights/mine"]) == shared, sizes
    done = subprocess.run([sys.executable, "-m", "tinker.cli", "checkpoint", "download", trained, "--output", str(tmp_path / "fetched")],
                          env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = [safetensors.torch.load_file(each) for each in (tmp_path / "fetched").rglob("*.safetensors")]
    assert len(fetched) == 1 and fetched[0].keys() == tensors.keys()
    assert all(torch.equal(fetched[0][name], tensors[name]) for name in tensors)

    # A copy goes on as the run does, after a restart too, whatever the server's setting is by then.
    saved = run.save_state("here").result().path
    expected = train(run, 4, lr=1e-2)
    server.stop(signal.SIGKILL)
    server.start(*settings[:2], f"serve.shared_expert_factors={'false' if shared else 'true'}")
    again = client(server).create_training_client_from_state_with_optimizer(saved).result()
    assert train(again, 4, lr=1e-2) == expected
    assert train(run, 2, lr=1e-2) == train(again, 2, lr=1e-2)
    assert sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result() == sampled
    assert server.stop() == 0

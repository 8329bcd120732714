"""Copies of weights, the audit log and the use of tenants, as the SDK and the command line show them.

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve/test_records.py
"""
import datetime
import signal
import subprocess

import openai
import pytest
import tinker
from tinker import types

from serve.serving import HEDDLE, NAME
from serve.test_tinker import TOKENS, client, datum, logprobs_of, train


def command(server, *words):
    return subprocess.run([HEDDLE, "serve", words[0], *words[1:], "--data-dir", str(server.data)], check=True, capture_output=True,
                          text=True).stdout


def test_a_copy_is_trained_on_from_where_its_source_was(server):
    service = client(server)
    run = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    train(run, 2)
    saved, sampled = run.save_state("a").result().path, run.save_weights_for_sampler("s").result().path
    archive = tinker.ServiceClient(base_url=server.url, api_key="tml-local", project_id="default")
    copies = [archive.copy_weights(path).result() for path in (saved, sampled)]
    assert len({*copies, saved, sampled}) == 4 and copies[0].endswith("/weights/a") and copies[1].endswith("/sampler_weights/s")
    rest = service.create_rest_client()
    rest.delete_checkpoint_from_tinker_path(saved).result()
    again = service.create_training_client_from_state_with_optimizer(copies[0]).result()
    assert logprobs_of(again).tolist() == logprobs_of(run).tolist() and train(again, 1) == train(run, 1)
    answer = service.create_sampling_client(model_path=copies[1]).result().sample(
        types.ModelInput.from_ints(TOKENS[:2]), 1, types.SamplingParams(max_tokens=2, stop=[])).result()
    assert len(answer.sequences[0].tokens) == 2
    with pytest.raises(tinker.BadRequestError, match="one project"):
        rest.copy_weights(copies[0], "another").result()


def test_a_key_of_another_tenant_reads_its_weights(server):
    assert server.stop() == 0
    ann, grant, bob = (command(server, "keys", "add", "--tenant", name, "--scopes", scopes).split()[-1]
                       for name, scopes in (("ann", "train,sample"), ("ann", "read"), ("bob", "train,sample")))
    server.start("serve.durable_steps=4")
    source = client(server, ann).create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    train(source, 2)
    saved = source.save_state("a").result().path
    other = client(server, bob)
    with pytest.raises(tinker.NotFoundError):
        other.create_training_client_from_state(saved).result()
    with pytest.raises(tinker.PermissionDeniedError, match="weights_access_token"):
        other.create_training_client_from_state(saved, weights_access_token="tml-guessed").result()
    run = other.create_training_client_from_state_with_optimizer(saved, weights_access_token=grant).result()
    copy = tinker.ServiceClient(base_url=server.url, api_key=bob, project_id="default").copy_weights(saved, weights_access_token=grant).result()
    assert other.create_rest_client().get_weights_info_by_tinker_path(copy).result().lora_rank == 4
    expected = train(source, 2)
    assert train(run, 1) == expected[:1]
    command(server, "keys", "revoke", grant[:12])
    server.stop(signal.SIGKILL)
    server.start("serve.durable_steps=4")
    assert train(run, 1) == expected[1:]
    assert grant.encode() not in b"".join(path.read_bytes() for path in server.data.glob("server.sqlite*"))


def test_who_did_what_and_used_how_much(server):
    assert server.stop() == 0
    ann, ops = (command(server, "keys", "add", "--tenant", name, "--scopes", scopes).split()[-1]
                for name, scopes in (("ann", "train,sample"), ("ops", "admin")))
    server.start()
    run = client(server, ann).create_lora_training_client(base_model=NAME, rank=4).result()
    run.forward_backward([datum()] * 3, "cross_entropy").result()
    path = run.save_state("a").result().path
    openai.OpenAI(base_url=server.url + "/v1", api_key=ann).completions.create(
        model=NAME, prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True})
    told = tinker.AdminClient(base_url=server.url, api_key=ops).get_audit_log().result()
    assert ("checkpoint_save", "ann", path) in [(e.event, e.event_details["tenant"], e.event_details["object"]) for e in told.entries]
    assert not tinker.AdminClient(base_url=server.url, api_key=ops).get_audit_log(day=datetime.date(2001, 2, 3)).result().entries
    assert server.stop() == 0
    rows = [line.split() for line in command(server, "usage").splitlines()]
    assert rows[0][:2] == ["day", "tenant"]
    used = [sum(numbers) for numbers in zip(*(map(int, row[4:7]) for row in rows[1:] if row[1] == "ann"))]
    assert used == [3 * (len(TOKENS) - 1), 3, 4]  # trained, read, generated
    log = command(server, "audit", "--tenant", "ann")
    assert f"checkpoint_save  {path}" in log and "key_add" in log and ann not in log and ann[:12] in log

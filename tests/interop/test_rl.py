"""Policies that `heddle rl` trains and the log-probabilities of rollouts, against transformers and peft; and ranks that only generate."""
import json
import sys

import pytest
import torch
from conftest import heddle, read_rows, write_rows
from peft import PeftModel
from test_model import LANGUAGE_MODELS, load, logits_of, token_rows

# A letter that a random model writes now and then: some completions of most groups are right.
PROMPTS = [{"prompt": prompt, "answer": "e"} for prompt in ("x is", "hello", "what", "two and two", "a", "name it")]


def arguments_of(model, tmp_path, name, method, *overrides):
    prompts = write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    settings = ["adapter.rank=4", "optim.lr=1e-2"] if method == "lora" else ["optim.lr=2e-3"]
    return ["rl", f"model.path={model}", f"data.train={prompts}", "data.max_length=48", f"train.output_dir={tmp_path / name}",
            f"train.method={method}", *settings, "optim.schedule=constant", "train.max_steps=4", "rl.groups_per_step=4",
            "rl.samples_per_group=16", "rl.reward.verifiers.contains=1", "rl.mode=sync", "rollout.max_new_tokens=24",
            "log.report=false", "log.tensorboard=false", *overrides]


def assert_learnt(run):
    steps = read_rows(run / "metrics.jsonl")
    assert len(steps) == 4 and sum(step["grad_norm"] > 0 for step in steps) >= 2, steps


def policy(model, tmp_path, method):
    heddle(*arguments_of(model, tmp_path, "run", method))
    assert_learnt(tmp_path / "run")
    return tmp_path / "run/final"


def rollouts(model, tmp_path, *arguments):
    """Of prompts of several lengths, two at a time: the last ones take the places of those that have ended."""
    prompts = token_rows((3, 40, 66, 1), seed=9)
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row, "seed": i} for i, row in enumerate(prompts)])
    heddle("generate", model, *arguments, "--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 70,
           "--max-sequences", 2, "--dtype", "float32", "--temperature", 1, "--top-p", 1, "--top-k", 0, "--min-p", 0)
    return read_rows(tmp_path / "out.jsonl")


def assert_drawn_from(model, rows):
    drawn, likeliest = 0, 0
    for row in rows:
        prompt, output = row["input_ids"], row["output_ids"]
        assert len(output) == len(row["logprobs"]) and (len(output) == 70 or row["finish_reason"] == "stop")
        expected = logits_of(model, prompt + output).log_softmax(-1)[len(prompt) - 1:-1]
        for position, token, found in zip(expected, output, row["logprobs"]):
            assert found == pytest.approx(position[token].item(), abs=1e-4)
            likeliest += int(position.argmax() == token)
        drawn += len(output)
    assert likeliest < drawn / 2


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_rollouts_have_the_logprobs_of_transformers(models, tmp_path, kind):
    base = load(models / kind)
    assert_drawn_from(base, rollouts(models / kind, tmp_path))
    final = policy(models / kind, tmp_path, "full")
    trained = load(final)
    row = token_rows((40,))[0]
    assert (logits_of(trained, row) - logits_of(base, row)).abs().max() > 0.05
    assert_drawn_from(trained, rollouts(final, tmp_path))


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_lora_policies_load_in_peft(models, tmp_path, kind):
    final = policy(models / kind, tmp_path, "lora")
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 4
    rows = token_rows((40, 70))
    before = [logits_of(load(models / kind), row).log_softmax(-1) for row in rows]
    adapted = PeftModel.from_pretrained(load(models / kind), final).eval()
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / kind, "--adapter", final, "--input", source, "--output", tmp_path / "scored.jsonl", "--dtype", "float32")
    for row, scored, untrained in zip(rows, read_rows(tmp_path / "scored.jsonl"), before):
        places, tokens = torch.arange(len(row) - 1), torch.tensor(row[1:])
        found = torch.tensor(scored["logprobs"][1:])
        assert torch.allclose(found, logits_of(adapted, row).log_softmax(-1)[places, tokens], rtol=0, atol=1e-4)
        assert (found - untrained[places, tokens]).abs().max() > 0.05
    assert_drawn_from(adapted, rollouts(models / kind, tmp_path, "--adapter", final))
    assert_drawn_from(adapted, rollouts(models / kind, tmp_path, "--adapter", final, "--merge-adapter"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_rank_that_only_generates_changes_no_bit(models, tmp_path, method):
    final = policy(models / "dense_tied", tmp_path, method)
    heddle("launch", "--nproc", 2, "--log-dir", tmp_path / "logs", "--",
           *arguments_of(models / "dense_tied", tmp_path, "apart", method, "rl.rollout_ranks=1", "device.threads=1"))
    assert_learnt(tmp_path / "apart")
    assert all("wait_s" in step for step in read_rows(tmp_path / "apart/metrics.jsonl"))
    name = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    assert (final / name).read_bytes() == (tmp_path / "apart/final" / name).read_bytes()


WORKER = """
import json, sys
for line in sys.stdin:
    sample = json.loads(line)
    turns = sample.get("turns", [])
    answer = {"reward": len(sample["completion"]) / 100, "id": sample["id"]}
    if len(turns) < 2:
        answer["observation"] = f" you said {len(sample['completion'])} letters, go on:"
    print(json.dumps(answer), flush=True)
"""


def test_turns_of_a_rollout_have_the_bits_of_one_process(models, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    turns = [f"rl.reward.command=[{sys.executable}, {worker}]", "rollout.stop=[a, e]", "rl.groups_every=1",
             "data.max_length=128", "rollout.max_new_tokens=96", "model.dtype=float32", "rl.deterministic=true"]

    def arguments(name, *more):
        words = arguments_of(models / "dense_tied", tmp_path, name, "full", *turns, *more)
        return [word for word in words if not word.startswith("rl.reward.verifiers")]

    heddle(*arguments("one"))
    heddle("launch", "--nproc", 2, "--log-dir", tmp_path / "logs", "--", *arguments("apart", "rl.rollout_ranks=1", "device.threads=1"))
    assert_learnt(tmp_path / "one")
    name = "final/model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "apart" / name).read_bytes()
    groups = read_rows(tmp_path / "apart/groups.jsonl")
    assert groups == read_rows(tmp_path / "one/groups.jsonl")
    assert {len(sample.get("turns", [])) for group in groups for sample in group["samples"]} >= {2}
    assert all(step["mismatch_abs_max"] < 1e-4 for step in read_rows(tmp_path / "one/metrics.jsonl")[:1])

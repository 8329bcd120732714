"""The same numbers as transformers and peft, in both directions."""
import json
import pathlib
import shutil

import pytest
import torch
import transformers
from conftest import heddle, read_rows, write_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SEEDS = {"moe": 300}
LANGUAGE_MODELS = ["dense_tied", "dense_untied", "moe", "next", "nested", "qwen3", "qwen3_moe", "qwen3_vl"]


def load(path):
    config = json.loads((path / "config.json").read_text())
    architecture = config["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32)


def token_rows(lengths, seed=1, low=2, high=258):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def logits_of(model, row):
    with torch.no_grad():
        return model(input_ids=torch.tensor([row])).logits[0]


def tensors_of(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def train(tmp_path, model, rows, *overrides, max_length=256, batch=None):
    data = write_rows(tmp_path / "train.jsonl", rows)
    output = tmp_path / "run"
    heddle("sft", f"model.path={model}", f"data.train={data}", "data.format=tokens", "data.packing=false",
           f"data.max_length={max_length}", "data.shuffle=false", f"train.output_dir={output}",
           f"train.global_batch_size={batch or len(rows)}", "train.micro_batch_tokens=300", "optim.schedule=constant",
           "log.report=false", "log.tensorboard=false", *overrides)
    return output


def hf_loss(model, rows):
    """Sum of token losses over their number, as one global batch."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
        count += len(row) - 1
    return total / count


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_logprobs_and_entropies_equal_transformers(models, tmp_path, kind):
    rows = token_rows((1, 5, 64, 65, 130, 200))
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / kind, "--input", source, "--output", tmp_path / "out.jsonl", "--entropy")
    model = load(models / kind)
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        assert scored["input_ids"] == row
        assert scored["logprobs"][0] is None and scored["entropies"][0] is None
        expected = logits_of(model, row).log_softmax(-1)
        entropies = torch.distributions.Categorical(logits=expected).entropy()
        for i in range(1, len(row)):
            assert scored["logprobs"][i] == pytest.approx(expected[i - 1, row[i]].item(), abs=1e-4)
            assert scored["entropies"][i] == pytest.approx(entropies[i - 1].item(), abs=1e-4)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_greedy_generation_equals_transformers(models, tmp_path, kind):
    rows = token_rows((7, 70), seed=5)
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("generate", models / kind, "--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 64,
           "--temperature", 0, "--ignore-eos")
    model = load(models / kind)
    for row, made in zip(rows, read_rows(tmp_path / "out.jsonl")):
        out = model.generate(torch.tensor([row]), max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert made["output_ids"] == out[0, len(row):].tolist()
        assert made["finish_reason"] == "length"


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_gradients_equal_transformers(models, tmp_path, kind):
    rows = token_rows((40, 65, 130))
    lr = 1.0
    output = train(tmp_path, models / kind, [{"input_ids": row} for row in rows], "train.max_steps=1", "optim.name=sgd",
                   f"optim.lr={lr}", "optim.clip_norm=0")
    model = load(models / kind)
    hf_loss(model, rows).backward()
    before, after = tensors_of(models / kind), tensors_of(output / "final")
    assert before.keys() == after.keys()
    reference = load(models / kind)  # the file's names for the module's parameters
    with torch.no_grad():
        for mine, parameter in zip(reference.parameters(), model.parameters()):
            if parameter.grad is not None:
                mine.sub_(lr * parameter.grad)
    reference.save_pretrained(tmp_path / "reference")
    expected = tensors_of(tmp_path / "reference")
    worst = 0
    for name in before:
        step, expected_step = after[name] - before[name], expected[name] - before[name]
        norm = expected_step.norm().item()
        if norm == 0:
            assert step.norm().item() == 0, name
            continue
        worst = max(worst, (step - expected_step).norm().item() / norm)
    assert worst < 1e-4, worst


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_twenty_adamw_steps_follow_transformers(models, tmp_path, kind):
    # A token that is nearly undecided between two experts may be routed differently by a rounding error, and the losses then
    # part for good: the data of the mixtures are chosen so that there is none.
    steps = [token_rows((30, 65, 100), seed=SEEDS.get(kind, 100) + i) for i in range(20)]
    rows = [{"input_ids": row} for step in steps for row in step]
    output = train(tmp_path, models / kind, rows, "train.max_steps=20", "optim.lr=1e-4", "optim.weight_decay=0",
                   "optim.clip_norm=1", batch=3)
    mine = [row["loss"] for row in read_rows(output / "metrics.jsonl")]
    model = load(models / kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    for i, step in enumerate(steps):
        loss = hf_loss(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert mine[i] == pytest.approx(loss.item(), abs=1e-4), i


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_full_export_loads_and_loses_nothing(models, tmp_path, kind):
    rows = token_rows((40, 65))
    output = train(tmp_path, models / kind, [{"input_ids": row} for row in rows], "train.max_steps=2", "optim.lr=1e-3")
    final = output / "final"
    before, after = tensors_of(models / kind), tensors_of(final)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape
        if "visual" in name:
            assert torch.equal(tensor, after[name])
    with safe_open(next(final.glob("*.safetensors")), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": rows[0]}])
    heddle("score", final, "--input", source, "--output", tmp_path / "out.jsonl")
    expected = logits_of(load(final), rows[0]).log_softmax(-1)
    scored = read_rows(tmp_path / "out.jsonl")[0]["logprobs"]
    for i in range(1, len(rows[0])):
        assert scored[i] == pytest.approx(expected[i - 1, rows[0][i]].item(), abs=1e-4)
    transformers.AutoTokenizer.from_pretrained(final)


@pytest.mark.parametrize("kind", ["dense_tied", "moe", "next", "nested", "qwen3", "qwen3_moe", "qwen3_vl"])
def test_adapter_loads_in_peft_and_merges(models, tmp_path, kind):
    from peft import PeftModel

    rows = token_rows((40, 65))
    output = train(tmp_path, models / kind, [{"input_ids": row} for row in rows], "train.max_steps=3", "optim.lr=1e-2",
                   "train.method=lora", "adapter.rank=4", "adapter.alpha=8")
    final = output / "final"
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / kind, "--adapter", final, "--input", source, "--output", tmp_path / "adapted.jsonl")
    heddle("export", models / kind, "--adapter", final, "--output", tmp_path / "merged")
    adapted = PeftModel.from_pretrained(load(models / kind), final)
    merged = load(tmp_path / "merged")
    base = load(models / kind)
    moved = 0
    for row, scored in zip(rows, read_rows(tmp_path / "adapted.jsonl")):
        expected = logits_of(adapted, row)
        assert torch.allclose(logits_of(merged, row), expected, atol=1e-4)
        moved = max(moved, (logits_of(base, row) - expected).abs().max().item())
        logprobs = expected.log_softmax(-1)
        for i in range(1, len(row)):
            assert scored["logprobs"][i] == pytest.approx(logprobs[i - 1, row[i]].item(), abs=1e-4)
    assert moved > 1e-2


def test_lora_step_equals_peft(models, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    rows = token_rows((40, 65, 100))
    first = train(tmp_path / "a" if (tmp_path / "a").mkdir() is None else None, models / "dense_tied",
                  [{"input_ids": row} for row in rows], "train.max_steps=1", "optim.lr=1e-2", "train.method=lora",
                  "adapter.rank=4", "adapter.alpha=8")
    second = train(tmp_path / "b" if (tmp_path / "b").mkdir() is None else None, models / "dense_tied",
                   [{"input_ids": row} for row in rows], "train.max_steps=6", "optim.lr=1e-2", "train.method=lora",
                   "adapter.rank=4", "adapter.alpha=8")
    wanted = sorted({name.split(".")[-1] for name in
                     json.loads((first / "final/adapter_config.json").read_text())["target_modules"]})
    model = get_peft_model(load(models / "dense_tied"), LoraConfig(r=4, lora_alpha=8, target_modules=wanted))
    assert sorted(json.loads((first / "final/adapter_config.json").read_text())["target_modules"]) == sorted(
        name for name in wanted)
    started = PeftModel.from_pretrained(load(models / "dense_tied"), first / "final", is_trainable=True)
    losses = [row["loss"] for row in read_rows(second / "metrics.jsonl")]
    # After one step the optimizer has moments; compare the loss that the first step's adapter gives.
    assert losses[1] == pytest.approx(hf_loss(started, rows).item(), abs=1e-4)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
        p.numel() for p in started.parameters() if p.requires_grad)


def test_classification_head(models, tmp_path):
    rows = token_rows((20, 64, 65, 90))
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / "classify", "--head", "classify", "--input", source, "--output", tmp_path / "out.jsonl")
    model = load(models / "classify")
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([row])).logits[0].tolist()
        assert scored["logits"] == pytest.approx(expected, abs=1e-4)
    labels = [0, 2, 1, 2]
    output = train(tmp_path, models / "classify", [{"input_ids": r, "label": c} for r, c in zip(rows, labels)],
                   "train.max_steps=20", "train.epochs=20", "optim.lr=1e-4", "optim.weight_decay=0", "model.head=classify",
                   "model.num_labels=3")
    mine = [row["loss"] for row in read_rows(output / "metrics.jsonl")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    for i in range(20):
        logits = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert mine[i] == pytest.approx(loss.item(), abs=1e-4), i
    trained = load(output / "final")
    with torch.no_grad():
        logits = torch.cat([trained(input_ids=torch.tensor([row])).logits for row in rows])
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])
    assert torch.allclose(logits, expected, atol=2e-3)


def test_embedding_head(models, tmp_path):
    rows = token_rows((20, 64, 65))
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / "dense_tied", "--head", "embed", "--input", source, "--output", tmp_path / "out.jsonl")
    model = load(models / "dense_tied").model
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=-1).tolist()
        assert scored["embedding"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["dense_tied", "dense_untied", "nested", "qwen3_vl"])
def test_added_tokens_grow_tokenizer_and_model(models, tmp_path, kind):
    """VOCAB rows are more than the tokenizer's ids: enough tokens are added to pass both."""
    tokens = [f"<|new-{i}|>" for i in range(70)]
    texts = [f"abc{tokens[3]} d{tokens[69]}é{tokens[0]}", f"{tokens[68]}{tokens[68]} x"]
    output = train(tmp_path, models / kind, [{"text": text} for text in texts], "train.max_steps=2", "optim.lr=1e-2",
                   f"model.added_tokens={json.dumps(tokens)}", "data.format=text")
    final = output / "final"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(final)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(models / kind)
    reference.add_special_tokens({"additional_special_tokens": tokens})
    assert len(tokenizer) == len(reference) > 320
    config = json.loads((final / "config.json").read_text())
    assert config.get("text_config", config)["vocab_size"] == len(tokenizer)
    source = write_rows(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    heddle("score", final, "--input", source, "--output", tmp_path / "out.jsonl")
    model = load(final)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    for text, scored in zip(texts, read_rows(tmp_path / "out.jsonl")):
        ids = reference(text)["input_ids"]
        assert scored["input_ids"] == ids == tokenizer(text)["input_ids"]
        expected = logits_of(model, ids).log_softmax(-1)
        for i in range(1, len(ids)):
            assert scored["logprobs"][i] == pytest.approx(expected[i - 1, ids[i]].item(), abs=1e-4)
    assert tokenizer.decode(tokenizer(texts[0])["input_ids"], skip_special_tokens=True) == "abc dé"


def test_new_rows_start_at_the_mean_of_the_old(models, tmp_path):
    tokens = [f"<|new-{i}|>" for i in range(70)]
    output = train(tmp_path, models / "dense_untied", [{"text": "abcdef"}], "train.max_steps=1", "optim.lr=0",
                   f"model.added_tokens={json.dumps(tokens)}", "data.format=text")
    before, after = tensors_of(models / "dense_untied"), tensors_of(output / "final")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = before[name]
        assert torch.equal(after[name][:len(old)], old)
        assert torch.allclose(after[name][len(old):], old.mean(0), atol=1e-6)


@pytest.mark.parametrize("kind, saved", [("dense_tied", ["embed_tokens"]), ("dense_untied", ["embed_tokens", "lm_head"])])
def test_added_tokens_with_lora_load_in_peft(models, tmp_path, kind, saved):
    from peft import PeftModel

    tokens = [f"<|new-{i}|>" for i in range(70)]
    rows = [{"text": f"abc{tokens[3]} d{tokens[69]}e"}]
    common = ("train.max_steps=3", "optim.lr=1e-2", "train.method=lora", "adapter.rank=4", "data.format=text",
              f"model.added_tokens={json.dumps(tokens)}")
    output = train(tmp_path, models / kind, rows, *common, f"adapter.modules_to_save={json.dumps(saved)}")
    final = output / "final"
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    ids = tokenizer(rows[0]["text"])["input_ids"]
    assert max(ids) == len(tokenizer) - 1
    base = load(models / kind)
    base.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(base, final)
    expected = logits_of(adapted, ids).log_softmax(-1)
    source = write_rows(tmp_path / "in.jsonl", rows)
    heddle("export", models / kind, "--adapter", final, "--output", tmp_path / "merged")
    merged = logits_of(load(tmp_path / "merged"), ids).log_softmax(-1)
    for model, adapter in ((models / kind, ["--adapter", final]), (tmp_path / "merged", [])):
        heddle("score", model, *adapter, "--input", source, "--output", tmp_path / "out.jsonl")
        scored = read_rows(tmp_path / "out.jsonl")[0]
        assert scored["input_ids"] == ids
        for i in range(1, len(ids)):
            assert scored["logprobs"][i] == pytest.approx(expected[i - 1, ids[i]].item(), abs=1e-4)
            assert scored["logprobs"][i] == pytest.approx(merged[i - 1, ids[i]].item(), abs=1e-4)


@pytest.mark.parametrize("kind", ["moe", "next", "qwen3_moe"])
@pytest.mark.parametrize("targets, shared", [([], False), (["all-linear"], False), ([], True), (["all-linear"], True)])
def test_expert_adapter_loads_in_peft_and_merges(models, tmp_path, kind, targets, shared):
    """PEFT knows no factors that experts share: each has a copy in the file."""
    from peft import PeftModel

    rows = token_rows((40, 65))
    output = train(tmp_path, models / kind, [{"input_ids": row} for row in rows], "train.max_steps=3", "optim.lr=1e-2",
                   "train.method=lora", "adapter.rank=4", "adapter.alpha=8", f"adapter.targets={json.dumps(targets)}",
                   "adapter.target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]",
                   f"adapter.shared_expert_factors={json.dumps(shared)}")
    final = output / "final"
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / kind, "--adapter", final, "--input", source, "--output", tmp_path / "adapted.jsonl")
    heddle("export", models / kind, "--adapter", final, "--output", tmp_path / "merged")
    adapted = PeftModel.from_pretrained(load(models / kind), final)
    merged, base = load(tmp_path / "merged"), load(models / kind)
    moved = 0
    for row, scored in zip(rows, read_rows(tmp_path / "adapted.jsonl")):
        expected = logits_of(adapted, row)
        assert torch.allclose(logits_of(merged, row), expected, atol=1e-4)
        moved = max(moved, (logits_of(base, row) - expected).abs().max().item())
        logprobs = expected.log_softmax(-1)
        for i in range(1, len(row)):
            assert scored["logprobs"][i] == pytest.approx(logprobs[i - 1, row[i]].item(), abs=1e-4)
    assert moved > 1e-2
    assert tensors_of(models / kind).keys() == tensors_of(tmp_path / "merged").keys()


def test_expert_adapter_of_peft_is_read(models, tmp_path):
    """PEFT draws both factors at random."""
    from peft import LoraConfig, get_peft_model

    rows = token_rows((40, 65, 100))
    torch.manual_seed(5)
    model = get_peft_model(load(models / "moe"), LoraConfig(
        r=3, lora_alpha=6, init_lora_weights=False,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    model.save_pretrained(tmp_path / "peft")
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row} for row in rows])
    heddle("score", models / "moe", "--adapter", tmp_path / "peft", "--input", source, "--output", tmp_path / "out.jsonl")
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        expected = logits_of(model, row).log_softmax(-1)
        for i in range(1, len(row)):
            assert scored["logprobs"][i] == pytest.approx(expected[i - 1, row[i]].item(), abs=1e-4)


def test_expert_adapter_follows_peft(models, tmp_path):
    """AdamW from Heddle's own start, which a run without a step writes."""
    from peft import PeftModel

    steps = [token_rows((30, 65, 100), seed=300 + i) for i in range(8)]
    common = ("optim.lr=1e-3", "optim.weight_decay=0", "train.method=lora", "adapter.rank=4", "adapter.targets=[]",
              "adapter.target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]")
    rows = [{"input_ids": row} for step in steps for row in step]
    (tmp_path / "start").mkdir()
    start = train(tmp_path / "start", models / "moe", rows, *common, "train.max_steps=1", "optim.lr=0", batch=3)
    output = train(tmp_path, models / "moe", rows, *common, "train.max_steps=8", batch=3)
    mine = [row["loss"] for row in read_rows(output / "metrics.jsonl")]
    model = PeftModel.from_pretrained(load(models / "moe"), start / "final", is_trainable=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0)
    for i, step in enumerate(steps):
        loss = hf_loss(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert mine[i] == pytest.approx(loss.item(), abs=1e-4), i


@pytest.mark.parametrize("kind", ["moe", "next", "qwen3_moe"])
def test_pooled_router_loss_equals_transformers(models, tmp_path, kind):
    """Loss and gradient (one SGD step) with output_router_logits, rows of one length as one batch."""
    rows, lr, coefficient = token_rows((60, 60, 60)), 1.0, 0.3
    output = train(tmp_path, models / kind, [{"input_ids": row} for row in rows], "train.max_steps=1", "optim.name=sgd",
                   f"optim.lr={lr}", "optim.clip_norm=0", "train.router_aux_loss=hf",
                   f"train.router_aux_loss_coef={coefficient}")
    model = load(models / kind)
    model.router_aux_loss_coef = coefficient
    ids = torch.tensor(rows)
    result = model(input_ids=ids, labels=ids, output_router_logits=True)
    result.loss.backward()
    step = read_rows(output / "metrics.jsonl")[0]
    assert step["aux_loss"] == pytest.approx(result.aux_loss.item(), abs=1e-5)
    assert step["loss"] + coefficient * step["aux_loss"] == pytest.approx(result.loss.item(), abs=1e-5)
    before, after = tensors_of(models / kind), tensors_of(output / "final")
    reference = load(models / kind)
    with torch.no_grad():
        for mine, parameter in zip(reference.parameters(), model.parameters()):
            if parameter.grad is not None:
                mine.sub_(lr * parameter.grad)
    reference.save_pretrained(tmp_path / "reference")
    expected = tensors_of(tmp_path / "reference")
    for name in before:
        moved, expected_moved = after[name] - before[name], expected[name] - before[name]
        assert (moved - expected_moved).norm() <= 1e-4 * expected_moved.norm() + 1e-9, name


def pair_rows(count, seed=11):
    """Pairs of token ids, every third with a negative."""
    queries, positives = token_rows([9 + i % 4 for i in range(count)], seed), token_rows([20 + i % 5 for i in range(count)], seed + 1)
    negatives = token_rows([17] * count, seed + 2)
    return [{"query": q, "positive": p, "negatives": [n] if i % 3 == 0 else []}
            for i, (q, p, n) in enumerate(zip(queries, positives, negatives))]


def info_nce(model, rows, temperature, normalize):
    def embed(ids):
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=-1) if normalize else hidden

    queries = torch.stack([embed(row["query"]) for row in rows])
    documents = torch.stack([embed(row["positive"]) for row in rows] + [embed(n) for row in rows for n in row["negatives"]])
    return torch.nn.functional.cross_entropy(queries @ documents.T / temperature, torch.arange(len(rows)))


@pytest.mark.parametrize("micro", [300, 90])
@pytest.mark.parametrize("normalize, temperature", [(True, 0.05), (False, 20.0)])
def test_embedding_training_equals_the_formula(models, tmp_path, normalize, temperature, micro):
    rows = pair_rows(18)
    output = train(tmp_path, models / "dense_tied", rows, "model.head=embed", "data.format=pairs", "train.max_steps=3",
                   "optim.lr=1e-4", "optim.weight_decay=0", f"model.normalize={str(normalize).lower()}",
                   f"train.infonce_temperature={temperature}", f"train.micro_batch_tokens={micro}",
                   max_length=64, batch=6)
    mine = [row["loss"] for row in read_rows(output / "metrics.jsonl")]
    model = load(models / "dense_tied").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    for i in range(3):
        loss = info_nce(model, rows[6 * i:6 * i + 6], temperature, normalize)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert mine[i] == pytest.approx(loss.item(), abs=1e-4), i
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row["query"]} for row in rows])
    heddle("score", output / "final", "--head", "embed", "--input", source, "--output", tmp_path / "out.jsonl")
    exported = load(output / "final").model
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        with torch.no_grad():
            hidden = exported(input_ids=torch.tensor([row["query"]])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=-1)
        assert scored["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)


def preference_rows(count, seed=21):
    """Prompts with two answers each, all token ids."""
    prompts, chosen = token_rows([5 + i % 4 for i in range(count)], seed), token_rows([6 + i % 7 for i in range(count)], seed + 1)
    return [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r}
            for p, c, r in zip(prompts, chosen, token_rows([8 - i % 5 for i in range(count)], seed + 2))]


def answer_logprob(model, prompt, answer):
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(answer)[:, None]).sum()


def loss_without_reference(policy, lengths, loss, beta, smoothing, gamma=0.5):
    """As ORPOTrainer.odds_ratio_loss and CPOTrainer.cpo_loss (loss_type simpo) of TRL, on [pairs, 2] of chosen and rejected."""
    chosen, rejected = (policy / lengths).unbind(1)
    logsigmoid = torch.nn.functional.logsigmoid
    if loss == "orpo":
        log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        losses = -beta * logsigmoid(log_odds)
    else:
        logits = chosen - rejected - gamma / beta
        losses = -logsigmoid(beta * logits) * (1 - smoothing) - logsigmoid(-beta * logits) * smoothing
    return losses.mean(), beta * (chosen - rejected)


def dpo_loss(policy, reference, lengths, loss, beta, smoothing):
    """As DPOTrainer.dpo_loss of TRL, on [pairs, 2] of chosen and rejected."""
    if loss in ("orpo", "simpo"):
        return loss_without_reference(policy, lengths, loss, beta, smoothing)
    if loss == "ipo":
        policy, reference = policy / lengths, reference / lengths
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    if loss == "sigmoid":
        losses = (-torch.nn.functional.logsigmoid(beta * logits) * (1 - smoothing)
                  - torch.nn.functional.logsigmoid(-beta * logits) * smoothing)
    elif loss == "hinge":
        losses = torch.relu(1 - beta * logits)
    else:
        losses = (logits - 1 / (2 * beta)) ** 2
    return losses.mean(), beta * logits


@pytest.mark.parametrize("loss, smoothing, sft", [("sigmoid", 0.1, 0.0), ("ipo", 0.0, 0.2), ("hinge", 0.0, 0.0),
                                                  ("orpo", 0.0, 1.0), ("simpo", 0.1, 0.0)])
def test_dpo_equals_the_formulas(models, tmp_path, loss, smoothing, sft):
    rows, beta = preference_rows(12), 0.3
    output = train(tmp_path, models / "dense_tied", rows, "train.objective=dpo", "data.format=auto", "train.max_steps=3",
                   "optim.lr=1e-3", "optim.weight_decay=0", f"dpo.beta={beta}", f"dpo.loss={loss}",
                   f"dpo.label_smoothing={smoothing}", f"dpo.sft_weight={sft}", "train.micro_batch_tokens=60",
                   max_length=24, batch=4)
    mine = read_rows(output / "metrics.jsonl")
    model, base = load(models / "dense_tied"), load(models / "dense_tied")
    before = tensors_of(models / "dense_tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    for i in range(3):
        batch = rows[4 * i:4 * i + 4]
        logps = lambda m: torch.stack([torch.stack([answer_logprob(m, row["prompt_ids"], row[name])
                                                    for name in ("chosen_ids", "rejected_ids")]) for row in batch])
        lengths = torch.tensor([[len(row["chosen_ids"]), len(row["rejected_ids"])] for row in batch])
        with torch.no_grad():
            reference = logps(base)
        policy = logps(model)
        mean, margins = dpo_loss(policy, reference, lengths, loss, beta, smoothing)
        mean = mean - sft * (policy[:, 0] / lengths[:, 0]).mean()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert mine[i]["loss"] == pytest.approx(mean.item(), abs=2e-4, rel=1e-5), i
        assert mine[i]["reward_margin"] == pytest.approx(margins.mean().item(), abs=2e-4), i
        assert mine[i]["reward_accuracy"] == pytest.approx((margins > 0).double().mean().item(), abs=1e-9) or i == 0
        seen = policy if loss in ("sigmoid", "hinge") else policy / lengths
        assert mine[i]["logps_rejected"] == pytest.approx(seen[:, 1].mean().item(), abs=2e-4), i
    model.save_pretrained(tmp_path / "reference")
    expected, after = tensors_of(tmp_path / "reference"), tensors_of(output / "final")
    for name in before:
        moved, expected_moved = after[name] - before[name], expected[name] - before[name]
        assert (moved - expected_moved).norm() <= 2e-2 * expected_moved.norm() + 1e-9, name


def test_reward_model_equals_the_formula(models, tmp_path):
    rows = preference_rows(12, seed=31)
    output = train(tmp_path, models / "dense_tied", rows, "train.objective=reward", "model.head=classify", "model.num_labels=1",
                   "data.format=auto", "train.max_steps=3", "optim.lr=0", max_length=24, batch=4)
    mine = read_rows(output / "metrics.jsonl")
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row["prompt_ids"] + row[name]} for row in rows
                                               for name in ("chosen_ids", "rejected_ids")])
    heddle("score", output / "final", "--head", "classify", "--input", source, "--output", tmp_path / "out.jsonl")
    scores = torch.tensor([row["logits"][0] for row in read_rows(tmp_path / "out.jsonl")]).double().view(-1, 2)
    # The weights do not move: the scores are those of every step.
    for i in range(3):
        difference = scores[4 * i:4 * i + 4, 0] - scores[4 * i:4 * i + 4, 1]
        assert mine[i]["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(difference).mean().item(), abs=1e-4)
        assert mine[i]["margin"] == pytest.approx(difference.mean().item(), abs=1e-4)
        assert mine[i]["accuracy"] == (difference > 0).double().mean().item()


def test_embedding_adapter_loads_in_peft(models, tmp_path):
    from peft import PeftModel

    rows = pair_rows(6)
    output = train(tmp_path, models / "dense_tied", rows, "model.head=embed", "train.max_steps=3", "optim.lr=1e-2",
                   "train.method=lora", "adapter.rank=4", "data.format=pairs", max_length=64)
    config = json.loads((output / "final/adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    model = PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(models / "dense_tied", dtype=torch.float32),
                                      output / "final")
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": row["query"]} for row in rows])
    heddle("score", models / "dense_tied", "--adapter", output / "final", "--head", "embed", "--input", source, "--output",
           tmp_path / "out.jsonl")
    for row, scored in zip(rows, read_rows(tmp_path / "out.jsonl")):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([row["query"]])).last_hidden_state[0, -1]
        assert scored["embedding"] == pytest.approx(torch.nn.functional.normalize(hidden, dim=-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_distributions_equal_transformers(models, tmp_path, kind):
    """The whole next-token distribution, told by scoring every token after a context: mean KL below 1e-6."""
    contexts = token_rows((1, 7, 64, 65, 130), seed=21)
    vocabulary = range(258)  # what the tokenizer has; the model's further rows are never predicted
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": [*context, token]} for context in contexts for token in vocabulary])
    heddle("score", models / kind, "--input", source, "--output", tmp_path / "out.jsonl")
    mine = torch.tensor([row["logprobs"][-1] for row in read_rows(tmp_path / "out.jsonl")],
                        dtype=torch.float64).view(len(contexts), len(vocabulary))
    model = load(models / kind)
    divergences = []
    for context, logprobs in zip(contexts, mine):
        logits = logits_of(model, context)[-1].double()
        expected = logits.log_softmax(-1)[:len(vocabulary)]
        assert torch.allclose(logprobs, expected, atol=1e-4)
        p = expected.exp()
        divergences.append((p * (expected - logprobs)).sum().item() + (logprobs.exp() - p).sum().item())
    assert sum(divergences) / len(divergences) < 1e-6, divergences


def test_template_arguments_equal_transformers(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    config = {"model_type": "qwen3_5_text", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64,
              "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
              "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heddle("init", "--config", tmp_path / "config.json", "--tokenizer", root / "examples/tokenizer-4k", "--output",
           tmp_path / "model", "--seed", "3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "What is 2 + 3?"}]

    def generated(row, *arguments):
        source = write_rows(tmp_path / "in.jsonl", [row])
        heddle("generate", tmp_path / "model", "--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 8,
               "--temperature", 0, "--ignore-eos", *arguments)
        return read_rows(tmp_path / "out.jsonl")[0]["output_ids"]

    made = {}
    for value in (True, False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=value)
        made[value] = generated({"messages": messages}, "--template-arg", f"enable_thinking={json.dumps(value)}")
        assert made[value] == generated({"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
    assert made[True] != made[False]
    # score renders the conversation itself
    for value in (True, False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=value)
        source = write_rows(tmp_path / "in.jsonl", [{"messages": messages}])
        heddle("score", tmp_path / "model", "--input", source, "--output", tmp_path / "out.jsonl", "--template-arg",
               f"enable_thinking={json.dumps(value)}")
        assert read_rows(tmp_path / "out.jsonl")[0]["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind, weight", [("dense_tied", "model.layers.2.mlp.down_proj.weight"), ("dense_untied", "lm_head.weight"),
                                          ("moe", "model.layers.0.mlp.shared_expert.up_proj.weight"), ("dense_tied", "model.norm.weight")])
def test_training_names_weights_that_are_not_finite(models, tmp_path, kind, weight):
    shutil.copytree(models / kind, tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors[weight].view(-1)[7] = float("nan")
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    rows = write_rows(tmp_path / "train.jsonl", [{"input_ids": row} for row in token_rows((30, 20))])
    result = heddle("sft", f"model.path={tmp_path / 'model'}", f"data.train={rows}", "train.max_steps=2", "log.report=false",
                    f"train.output_dir={tmp_path / 'run'}", check=False)
    assert result.returncode == 1
    assert f"step 1: the loss is" in result.stderr and f"because {weight} holds NaN or infinity" in result.stderr
    assert "optim.lr" not in result.stderr.splitlines()[-1]

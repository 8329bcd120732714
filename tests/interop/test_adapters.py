"""Every kind of adapter that PEFT writes, scored and merged as PEFT computes it, and those that Heddle writes, loaded in PEFT."""
import json

import pytest
import torch
import transformers
from conftest import heddle, read_rows, write_rows
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_model import load, logits_of, token_rows, train

ROW = token_rows((40,))[0]
# name: model, configuration of LoRA
KINDS = {
    "head": ("dense_untied", dict(target_modules=["lm_head", "q_proj"])),
    "head_of_tied": ("dense_tied", dict(target_modules=["lm_head"])),
    "embedding": ("dense_untied", dict(target_modules=["embed_tokens", "v_proj"])),
    "embedding_of_tied": ("dense_tied", dict(target_modules=["embed_tokens"])),
    "tied_adapters": ("dense_tied", dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
    "both_tables_of_tied": ("dense_tied", dict(target_modules=["embed_tokens", "lm_head"])),
    "saved_embedding_of_tied": ("dense_tied", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    "saved_head_of_tied": ("dense_tied", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "saved_tied": ("dense_tied", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "saved_tables": ("dense_untied", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "saved_norms": ("dense_tied", dict(target_modules=["q_proj"], modules_to_save=["norm"])),
    "saved_block": ("dense_untied", dict(target_modules=["q_proj"], modules_to_save=["layers.1.linear_attn", "layernorm"])),
    "saved_in_nested": ("nested", dict(target_modules=["q_proj", "down_proj"], modules_to_save=["language_model.norm"])),
    "vision": ("nested", dict(target_modules="all-linear")),
    "experts": ("moe", dict(target_modules=["q_proj", "out_proj"], target_parameters=["gate_up_proj", "down_proj"])),
    "router": ("moe", dict(target_modules=["k_proj"], target_parameters=["mlp.gate.weight"])),
}


def randomized(model, config):
    """The model with an adapter of which every part acts."""
    torch.manual_seed(11)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape) * (0.2 if "lora_" in name else 0.05))
    return adapted


def scored(model, adapter, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": ROW}])
    heddle("score", model, "--adapter", adapter, "--input", source, "--output", tmp_path / "out.jsonl")
    return read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:]


def assert_same(found, logits):
    expected = logits.log_softmax(-1)
    for i, value in enumerate(found):
        assert value == pytest.approx(expected[i, ROW[i + 1]].item(), abs=1e-4), i


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_peft_act_and_merge_as_there(models, tmp_path, name):
    kind, config = KINDS[name]
    base = load(models / kind)
    before = logits_of(base, ROW)
    adapted = randomized(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    logits = logits_of(adapted, ROW)
    assert (logits - before).abs().max() > 0.05
    assert_same(scored(models / kind, tmp_path / "adapter", tmp_path), logits)
    heddle("export", models / kind, "--adapter", tmp_path / "adapter", "--output", tmp_path / "merged")
    merged = load(tmp_path / "merged")
    assert torch.allclose(logits_of(merged, ROW), logits, atol=1e-4)
    if name == "vision":
        expected = adapted.merge_and_unload().state_dict()
        for key, tensor in merged.state_dict().items():
            assert torch.allclose(tensor, expected[key], atol=1e-5), key


# What a run goes on from; the other kinds are refused by name.
TRAINED = {"saved_tied", "saved_tables", "saved_norms", "saved_block", "saved_in_nested", "experts"}


@pytest.mark.parametrize("name", KINDS)
def test_runs_go_on_from_adapters_of_peft(models, tmp_path, name):
    kind, config = KINDS[name]
    adapted = randomized(load(models / kind), config)
    adapted.save_pretrained(tmp_path / "adapter")
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ROW}])
    result = heddle("sft", f"model.path={models / kind}", f"data.train={rows}", "train.method=lora", "data.max_length=64",
                    f"adapter.path={tmp_path / 'adapter'}", "train.max_steps=1", "optim.lr=0", "log.report=false",
                    f"train.output_dir={tmp_path / 'run'}", check=name in TRAINED)
    if name not in TRAINED:
        assert result.returncode == 2
        assert "heddle export BASE --adapter" in result.stderr, result.stderr
        return
    logits = logits_of(adapted, ROW)
    assert_same(scored(models / kind, tmp_path / "run/final", tmp_path), logits)
    again = PeftModel.from_pretrained(load(models / kind), tmp_path / "run/final").eval()
    assert torch.allclose(logits_of(again, ROW), logits, atol=1e-5)


def test_targets_without_weights_are_named(models, tmp_path):
    randomized(load(models / "dense_untied"), dict(target_modules=["q_proj", "v_proj"])).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": ROW}])
    score = ["score", models / "dense_untied", "--adapter", tmp_path / "adapter", "--input", source, "--output"]
    assert "target_modules" not in heddle(*score, tmp_path / "whole.jsonl").stderr
    save_file({name: tensor for name, tensor in load_file(file).items() if "v_proj" not in name}, file)
    told = heddle(*score, tmp_path / "part.jsonl").stderr
    assert "target_modules names" in told and ".v_proj" in told and "q_proj" not in told


def test_a_state_dict_with_the_adapters_name_is_read(models, tmp_path):
    adapted = randomized(load(models / "dense_tied"), KINDS["saved_norms"][1])
    adapted.save_pretrained(tmp_path / "adapter")
    raw = {key: value.contiguous() for key, value in adapted.state_dict().items()
           if ".default." in key and ("lora_" in key or "modules_to_save" in key)}
    save_file(raw, tmp_path / "adapter/adapter_model.safetensors")
    assert_same(scored(models / "dense_tied", tmp_path / "adapter", tmp_path), logits_of(adapted, ROW))


def test_adapters_of_single_experts_are_those_of_the_stack(models, tmp_path):
    """Made from the stacked factors: gate and up of an expert apart, each with the shared A."""
    adapted = randomized(load(models / "moe"), dict(target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    single, experts, rank, width = {}, 8, 4, 48
    for key in [key for key in tensors if ".mlp.experts." in key and key.endswith("lora_A.weight")]:
        a, b = tensors.pop(key), tensors.pop(key.replace("lora_A", "lora_B"))
        module = key[:key.index(".lora_A")].removesuffix(".base_layer")
        is_down = a.shape[1] == width
        for e in range(experts):
            own_b = b.view(b.shape[0], rank, experts)[:, :, e]
            parts = {"down_proj": own_b} if is_down else {"gate_proj": own_b[:width], "up_proj": own_b[width:]}
            for part, rows in parts.items():
                single[f"{module}.{e}.{part}.lora_A.weight"] = a[e * rank:(e + 1) * rank].clone()
                single[f"{module}.{e}.{part}.lora_B.weight"] = rows.clone()
    assert len(single) == 4 * experts * 3 * 2
    save_file({**tensors, **single}, tmp_path / "adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config.update(target_parameters=None, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    assert_same(scored(models / "moe", tmp_path / "adapter", tmp_path), logits_of(adapted, ROW))


@pytest.mark.parametrize("kind, saved, head", [
    ("dense_untied", "norm", "lm"), ("dense_untied", "model.norm", "lm"), ("dense_untied", "layers.0.mlp.up_proj", "lm"),
    ("dense_untied", "input_layernorm", "lm"), ("dense_untied", "linear_attn", "lm"), ("dense_untied", "lm_head", "lm"),
    ("dense_tied", "embed_tokens", "lm"), ("dense_tied", "model.norm", "embed"), ("nested", "language_model.norm", "lm"),
    ("nested", "layers.3.post_attention_layernorm", "lm"), ("next", "mlp.shared_expert", "lm")])
def test_saved_modules_of_heddle_load_in_peft(models, tmp_path, kind, saved, head):
    rows = [{"query": ROW, "positive": ROW[::-1]}, {"query": ROW[5:], "positive": ROW[:20]}] if head == "embed" else [{"input_ids": ROW}]
    output = train(tmp_path, models / kind, rows, "train.max_steps=3", "optim.lr=1e-2", "train.method=lora", "adapter.rank=4",
                   "adapter.targets=[q_proj]", f"adapter.modules_to_save=[{saved}]",
                   *(["model.head=embed", "data.format=pairs"] if head == "embed" else []))
    base = load(models / kind)
    if head == "embed":
        base = base.model
    before = base(input_ids=torch.tensor([ROW]))[0].detach()
    adapted = PeftModel.from_pretrained(base, output / "final").eval()
    with torch.no_grad():
        result = adapted(input_ids=torch.tensor([ROW]))[0]
    assert (result - before).abs().max() > 1e-3
    config = json.loads((output / "final/adapter_config.json").read_text())
    assert len(config["modules_to_save"]) == len(set(config["modules_to_save"]))
    if head == "lm":
        return assert_same(scored(models / kind, output / "final", tmp_path), result[0])
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": ROW}])
    heddle("score", models / kind, "--adapter", output / "final", "--head", "embed", "--input", source, "--output",
           tmp_path / "out.jsonl")
    expected = torch.nn.functional.normalize(result[0, -1], dim=-1).tolist()
    assert read_rows(tmp_path / "out.jsonl")[0]["embedding"] == pytest.approx(expected, abs=1e-5)


def test_a_checkpoint_that_contradicts_itself_is_read_as_transformers_reads_it(models, tmp_path):
    """Tied by config.json, with two tables that differ."""
    model = load(models / "dense_tied")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * -0.5)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((models / "dense_tied" / name).read_bytes())
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    expected = logits_of(load(tmp_path / "model"), ROW)
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": ROW}])
    said = heddle("score", tmp_path / "model", "--input", source, "--output", tmp_path / "out.jsonl").stderr
    assert "lm_head.weight and model.embed_tokens.weight differ" in said
    assert_same(read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:], expected)
    heddle("export", tmp_path / "model", "--output", tmp_path / "out")
    assert torch.equal(logits_of(load(tmp_path / "out"), ROW), logits_of(load(tmp_path / "model"), ROW))


@pytest.mark.parametrize("kind", ["dense_tied", "nested"])
def test_folders_of_auto_model_are_read(models, tmp_path, kind):
    transformers.AutoModel.from_pretrained(models / kind, dtype=torch.float32).save_pretrained(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((models / kind / name).read_bytes())
    assert not any(key.startswith("model.") for key in load_file(tmp_path / "bare/model.safetensors"))
    source = write_rows(tmp_path / "in.jsonl", [{"input_ids": ROW}])
    heddle("score", tmp_path / "bare", "--input", source, "--output", tmp_path / "out.jsonl")
    assert_same(read_rows(tmp_path / "out.jsonl")[0]["logprobs"][1:], logits_of(load(models / kind), ROW))

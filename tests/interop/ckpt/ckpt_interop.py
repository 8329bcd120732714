"""Checks the checkpoint layer against the Python libraries:

    ckpt_interop.py --rewrite build/cpu/tests/ckpt/heddle_ckpt_rewrite

Models that transformers wrote are read and written again by Heddle (one file and shards, half of the tensors carried
through): the Python library opens the files, every tensor is bit for bit the same, transformers loads the directory without a
missing or unexpected key and gives equal logits. Adapters that peft wrote are read and written again: peft loads them onto the
base model with equal logits, in both spellings where the model has two, and Heddle's scaling of every pair is peft's.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextForSequenceClassification

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SHAPE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
TOKENS = torch.tensor([[5, 17, 3, 88, 41, 2, 63]])


def text_model(**more):
    config = transformers.Qwen3_5TextConfig(**SHAPE, intermediate_size=48, tie_word_embeddings=False, **more)
    return transformers.Qwen3_5ForCausalLM(config)


def moe_model():
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SHAPE, **MOE, tie_word_embeddings=False))


def image_text_model():
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=24, out_hidden_size=32, patch_size=4)
    config = transformers.Qwen3_5Config(text_config=dict(SHAPE, intermediate_size=48), vision_config=vision,
                                        tie_word_embeddings=False)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def classifier():
    config = transformers.Qwen3_5TextConfig(**SHAPE, intermediate_size=48, num_labels=1, pad_token_id=0)
    return Qwen3_5TextForSequenceClassification(config)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors_of(directory):
    tensors = {}
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
        tensors.update(load_file(file))
    return tensors


def assert_same_bits(left, right):
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        if tensor.numel():
            assert torch.equal(tensor.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)), name


def check_model(rewrite, work, name, model, dtype):
    source = work / f"{name}-{dtype}"
    model.to(dtype).save_pretrained(source)
    # Tensors that transformers ignores must survive too.
    file = source / "model.safetensors"
    extra = {"mtp.fc.weight": torch.randn(32, 64).to(dtype), "model.visual.unused.weight": torch.randn(3, 5).to(torch.float16)}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    expected = logits(type(model).from_pretrained(source, dtype=dtype))
    for limit in (10**9, 20_000):
        out = work / f"{name}-{dtype}-{limit}"
        run(rewrite, "model", source, out, limit)
        assert (out / "model.safetensors.index.json").exists() == (limit == 20_000)
        assert_same_bits(tensors_of(source), tensors_of(out))
        loaded, info = type(model).from_pretrained(out, dtype=dtype, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"], info
        assert torch.equal(logits(loaded), expected), name
        if limit == 10**9:
            assert (out / "model.safetensors").read_bytes() == file.read_bytes(), "another layout than the library's"
    print(f"ok  model {name} {dtype}: one file and {len(list(out.glob('*.safetensors')))} shards")


def randomise(model):
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def check_adapter(rewrite, work, name, make, config, spellings=("same",)):
    torch.manual_seed(0)
    base = make()
    base.save_pretrained(work / f"{name}-base")
    tuned = get_peft_model(base, config)
    randomise(tuned)
    expected = logits(tuned)
    source = work / f"{name}-adapter"
    tuned.save_pretrained(source)
    scalings = {}
    for line in run(rewrite, "scalings", source).splitlines():
        module, rank, scaling = line.split()
        scalings[module] = (int(rank), float(scaling))
    found = 0
    for module_name, module in tuned.named_modules():
        if not isinstance(getattr(module, "scaling", None), dict) or not module.scaling:
            continue
        key = module_name.removeprefix("base_model.model.").replace("language_model.", "").replace(".base_layer", "")
        key = key if key.startswith(("model.", "lm_head", "score")) else "model." + key
        key += f".{module.parameter_name}" if hasattr(module, "parameter_name") else ""
        assert scalings[key] == (module.r["default"], module.scaling["default"]), (key, scalings[key])
        found += 1
    assert found == len(scalings), (found, len(scalings))
    for spelling in spellings:
        out = work / f"{name}-rewritten-{spelling}"
        run(rewrite, "adapter", source, out, spelling)
        if spelling == "same":
            assert_same_bits(tensors_of(source), tensors_of(out))
            loaded = PeftModel.from_pretrained(type(base).from_pretrained(work / f"{name}-base"), out)
            difference = (logits(loaded) - expected).abs().max().item()
            assert difference < 1e-6, (name, difference)
        else:
            # Written in another spelling and back again.
            back = work / f"{name}-back-from-{spelling}"
            run(rewrite, "adapter", out, back, "nested" if "language_model" in str(tensors_of(source).keys()) else "text")
            assert_same_bits(tensors_of(source), tensors_of(back))
    print(f"ok  adapter {name}: {found} pairs")


def check_spelling_fits_both_classes(rewrite, work):
    """An adapter made on the image-text class, written in the text spelling, loads onto the text class of the same weights."""
    torch.manual_seed(0)
    nested = image_text_model()
    tuned = get_peft_model(nested, LoraConfig(r=3, target_modules=r".*language_model.*(q_proj|in_proj_z|up_proj)", use_rslora=True))
    randomise(tuned)
    tuned.save_pretrained(work / "both-adapter")
    expected = logits(tuned)
    # The pattern names the nested modules: the other class needs names that both share.
    config_file = work / "both-adapter" / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["target_modules"] = ["q_proj", "in_proj_z", "up_proj"]
    config_file.write_text(json.dumps(config))
    run(rewrite, "adapter", work / "both-adapter", work / "both-text", "text")
    text = transformers.Qwen3_5ForCausalLM(nested.config.get_text_config())
    state = {k.replace("model.language_model.", "model.").replace(".base_layer", "").removeprefix("base_model.model."): v
             for k, v in tuned.state_dict().items() if "lora_" not in k and "visual" not in k}
    text.load_state_dict(state)
    difference = (logits(PeftModel.from_pretrained(text, work / "both-text")) - expected).abs().max().item()
    assert difference < 1e-5, difference
    print("ok  adapter of the image-text class on the text class")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rewrite", required=True, type=pathlib.Path)
    parser.add_argument("--only", choices=("models", "adapters"))
    arguments = parser.parse_args()
    rewrite = arguments.rewrite.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        torch.manual_seed(1)
        if arguments.only != "adapters":
            for dtype in (torch.float32, torch.bfloat16):
                check_model(rewrite, work, "dense", text_model(), dtype)
                check_model(rewrite, work, "moe", moe_model(), dtype)
                check_model(rewrite, work, "image-text", image_text_model(), dtype)
        if arguments.only != "models":
            check_adapter(rewrite, work, "all-linear", text_model, LoraConfig(
                r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["lm_head", "embed_tokens"]),
                ("same", "nested", "bare"))
            check_adapter(rewrite, work, "patterns", text_model, LoraConfig(
                r=4, lora_alpha=3, use_rslora=True, target_modules=r".*\.(q_proj|in_proj_qkv|down_proj)", lora_dropout=0.1,
                rank_pattern={"layers.0.linear_attn.in_proj_qkv": 7, "^model.layers.1.*": 2}, alpha_pattern={"down_proj": 5}))
            check_adapter(rewrite, work, "layers", text_model, LoraConfig(
                r=4, target_modules=["up_proj"], layers_to_transform=[1, 3], exclude_modules=["layers.3.mlp.up_proj"]))
            check_adapter(rewrite, work, "head", text_model, LoraConfig(r=4, target_modules=["lm_head", "out_proj"]))
            check_adapter(rewrite, work, "nested", image_text_model, LoraConfig(
                r=4, target_modules=r".*language_model.*(q_proj|in_proj_z)"), ("same", "bare-nested"))
            check_adapter(rewrite, work, "classifier", classifier, LoraConfig(
                r=4, target_modules=["q_proj", "in_proj_a"], task_type="SEQ_CLS"))
            check_adapter(rewrite, work, "experts", moe_model, LoraConfig(
                r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
            check_spelling_fits_both_classes(rewrite, work)


if __name__ == "__main__":
    main()

"""Tiny random models written by transformers, one of each kind that Heddle reads.

    python tests/interop/tiny_models.py OUTPUT_DIR

makes OUTPUT_DIR/{dense_tied,dense_untied,moe,next,classify,nested,qwen3,qwen3_moe,qwen3_vl}, each with a byte-level tokenizer.
"""
import json
import pathlib
import shutil
import sys

import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextForSequenceClassification

VOCAB = 320
COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
)
EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40,
)


def randomize(model):
    """Gates that remember, norms that are not neutral: every formula matters."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 - 2)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif name.endswith("norm.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def write_tokenizer(folder):
    """Byte-level BPE without merges: token = byte, plus the specials that the configs name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1}
    for symbol in alphabet:
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}))


def build(kind):
    torch.manual_seed(3)
    if kind in ("dense_tied", "dense_untied", "classify"):
        config = Qwen3_5TextConfig(**COMMON, intermediate_size=96, tie_word_embeddings=kind == "dense_tied")
        if kind == "classify":
            config.num_labels = 3
            return Qwen3_5TextForSequenceClassification(config)
        return Qwen3_5ForCausalLM(config)
    if kind == "moe":
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **EXPERTS, tie_word_embeddings=False))
    if kind == "next":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, **EXPERTS, intermediate_size=96, tie_word_embeddings=False))
    if kind == "qwen3_vl":
        text = {key: value for key, value in COMMON.items() if not key.startswith("linear_")}
        text |= dict(intermediate_size=96, tie_word_embeddings=False, rope_parameters={
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True})
        vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64,
                      num_position_embeddings=16, patch_size=4, deepstack_visual_indexes=[0])
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    if kind.startswith("qwen3"):
        common = {key: value for key, value in COMMON.items() if not key.startswith("linear_")}
        if kind == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**common, intermediate_size=96, tie_word_embeddings=True))
        experts = {key: value for key, value in EXPERTS.items() if not key.startswith("shared_")}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, intermediate_size=96, mlp_only_layers=[1],
                                                  norm_topk_prob=True, tie_word_embeddings=False))
    text = dict(COMMON, intermediate_size=96, tie_word_embeddings=True)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                               "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64,
                  num_position_embeddings=16, patch_size=4)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True))


KINDS = ("dense_tied", "dense_untied", "moe", "next", "classify", "nested", "qwen3", "qwen3_moe", "qwen3_vl")


def main(output):
    output = pathlib.Path(output)
    for kind in KINDS:
        folder = output / kind
        shutil.rmtree(folder, ignore_errors=True)
        randomize(build(kind).float()).save_pretrained(folder)
        write_tokenizer(folder)
    print("wrote", ", ".join(KINDS), "to", output)


if __name__ == "__main__":
    main(sys.argv[1])

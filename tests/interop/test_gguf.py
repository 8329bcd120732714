"""GGUF files against the reader of the `gguf` package, against the tensors that they come from, and in llama.cpp (the package
`xllamacpp`). The transforms are written here from their definition, not from the program: heads are moved index by index."""
import json
import pathlib
import random
import shutil

import numpy
import pytest
import torch

from conftest import heddle, read_rows, write_rows
from test_model import tensors_of

gguf = pytest.importorskip("gguf")


def read(path):
    reader = gguf.GGUFReader(path)
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        data = numpy.array(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = torch.from_numpy(data.view(numpy.uint16).astype(numpy.int32) << 16).view(torch.float32)
        else:
            data = torch.from_numpy(data.astype(numpy.float32))
        tensors[tensor.name] = data.reshape(shape)
    return reader, tensors


def tiled_rows(rows, keys, each, width):
    """Row blocks of value heads, from k0v0 k0v1 k1v0 ... to k0v0 k1v0 ... k0v1 ..."""
    blocks = [rows[(k * each + v) * width:(k * each + v + 1) * width] for v in range(each) for k in range(keys)]
    return torch.cat(blocks)


KINDS = {"dense_tied": "qwen35", "nested": "qwen35", "moe": "qwen35moe", "next": "qwen3next", "qwen3": "qwen3"}


@pytest.mark.parametrize("kind", KINDS)
def test_reader_finds_every_tensor_in_the_published_layout(models, tmp_path, kind):
    name = KINDS[kind]
    config = json.loads((models / kind / "config.json").read_text())
    text = config.get("text_config", config)
    output = tmp_path / "model.gguf"
    heddle("export", models / kind, "--gguf", "--output", output)
    reader, tensors = read(output)
    assert reader.fields["general.architecture"].contents() == name
    assert reader.fields[f"{name}.block_count"].contents() == text["num_hidden_layers"]
    vocabulary = json.loads((models / kind / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == text["vocab_size"] and all(tokens[i] == token for token, i in vocabulary.items())
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name)
    known = {gguf.TENSOR_NAMES[tensor].format(bid=i) for tensor in gguf.MODEL_TENSORS[architecture]
             for i in range(text["num_hidden_layers"])}
    assert {n.removesuffix(".weight").removesuffix(".bias") for n in tensors} <= known
    stored = {n.replace("model.language_model.", "model."): t.float() for n, t in tensors_of(models / kind).items()}
    check(stored, tensors, text, name)


def check(stored, tensors, text, name):
    offset = 0 if name in ("qwen3", "qwen3moe") else 1
    assert torch.equal(tensors["token_embd.weight"], stored["model.embed_tokens.weight"])
    assert torch.allclose(tensors["output_norm.weight"], stored["model.norm.weight"] + offset)
    for i in range(text["num_hidden_layers"]):
        layer, block = f"model.layers.{i}.", f"blk.{i}."
        if layer + "linear_attn.A_log" not in stored or not name.startswith("qwen35"):
            continue
        keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
        each, width = values // keys, text["linear_value_head_dim"]
        a = stored[layer + "linear_attn.A_log"]
        expected = torch.stack([-a[k * each + v].exp() for v in range(each) for k in range(keys)])
        assert torch.allclose(tensors[block + "ssm_a"], expected)
        qk = 2 * keys * text["linear_key_head_dim"]
        qkv = stored[layer + "linear_attn.in_proj_qkv.weight"]
        assert torch.equal(tensors[block + "attn_qkv.weight"], torch.cat([qkv[:qk], tiled_rows(qkv[qk:], keys, each, width)]))
        out = stored[layer + "linear_attn.out_proj.weight"]
        assert torch.equal(tensors[block + "ssm_out.weight"], tiled_rows(out.T, keys, each, width).T)
        convolution = stored[layer + "linear_attn.conv1d.weight"].squeeze(1)
        assert torch.equal(tensors[block + "ssm_conv1d.weight"],
                           torch.cat([convolution[:qk], tiled_rows(convolution[qk:], keys, each, width)]))
        if layer + "mlp.experts.gate_up_proj" in stored:
            both = stored[layer + "mlp.experts.gate_up_proj"]
            half = both.shape[1] // 2
            assert torch.equal(tensors[block + "ffn_gate_exps.weight"], both[:, :half])
            assert torch.equal(tensors[block + "ffn_up_exps.weight"], both[:, half:])


def test_refuses_what_it_cannot_say(models, tmp_path):
    result = heddle("export", models / "qwen3_moe", "--gguf", "--output", tmp_path / "a.gguf", check=False)
    assert result.returncode == 2 and "a dense layer among layers with experts" in result.stderr
    result = heddle("export", models / "dense_tied", "--adapter", "x", "--gguf", "--output", tmp_path / "a.gguf", check=False)
    assert result.returncode == 2 and "--adapter x --output DIR" in result.stderr


def llama(path):
    """llama.cpp with one sequence, everything in float32."""
    xllamacpp = pytest.importorskip("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.fit_params = 512, 1, False, False
    parameters.use_jinja, parameters.verbosity = True, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(parameters)


def ids_and_logprobs(answer):
    tokens = answer["choices"][0]["logprobs"]["content"]
    return [t["id"] for t in tokens], [t["logprob"] for t in tokens]


def with_plain_tokens(model, folder):
    """A copy of the model in which every token is ASCII: llama.cpp reports no token that ends within a character."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    rows = json.loads((folder / "config.json").read_text())
    names = {i: token for token, i in tokenizer["model"]["vocab"].items() if len(token) > 1 or token.isascii()}
    tokenizer["model"]["vocab"] = {names.get(i, f"t{i}"): i for i in range(rows.get("text_config", rows)["vocab_size"])}
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_answers_as_generate_does(models, tmp_path, kind):
    model = with_plain_tokens(models / kind, tmp_path / "model")
    heddle("export", model, "--gguf", "--output", tmp_path / "made" / "model.gguf")
    draw = random.Random(5)
    prompts = [[draw.randrange(2, 258) for _ in range(length)] for length in (3, 17, 90)]
    rows = write_rows(tmp_path / "in.jsonl", [{"input_ids": ids} for ids in prompts])
    heddle("generate", model, "--input", rows, "--output", tmp_path / "out.jsonl", "--temperature", 0, "--max-new-tokens", 24,
           "--dtype", "float32", "--device", "cpu")
    server = llama(tmp_path / "made" / "model.gguf")
    for ids, ours in zip(prompts, read_rows(tmp_path / "out.jsonl")):
        theirs, logprobs = ids_and_logprobs(server.handle_completions(
            {"prompt": ids, "max_tokens": 24, "temperature": 0, "logprobs": 1, "cache_prompt": False}))
        assert theirs == ours["output_ids"]
        assert numpy.allclose(logprobs, ours["logprobs"], atol=3e-5), numpy.abs(numpy.subtract(logprobs, ours["logprobs"])).max()


def test_llama_cpp_splits_and_renders_text_as_generate_does(tmp_path):
    """A token more or less, or another one, would give other log-probabilities."""
    model, examples = tmp_path / "small", pathlib.Path(__file__).resolve().parents[2] / "examples"
    heddle("init", "--preset", "small-2m", "--tokenizer", examples / "tokenizer-4k", "--output", model, "--seed", 1)
    heddle("export", model, "--gguf", "--output", tmp_path / "small.gguf")
    server = llama(tmp_path / "small.gguf")
    texts = ["The 12 quick brown foxes' café - naïve \n\n\n  12345 don't", "日本語 हिन्दी <|im_start|>user\nHi<|im_end|>\n",
             "\t\t tabs  \r\n crlf", "<think>\nx</think> <tool_call>a", "नमस्ते दुनिया \u200d👩\u200d👧 ①½"]
    rows = write_rows(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    heddle("generate", model, "--raw", "--input", rows, "--output", tmp_path / "out.jsonl", "--temperature", 0, "--max-new-tokens", 1)
    for text, ours in zip(texts, read_rows(tmp_path / "out.jsonl")):
        theirs, logprobs = ids_and_logprobs(server.handle_completions(
            {"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 1}))
        assert theirs == ours["output_ids"] and numpy.allclose(logprobs, ours["logprobs"], atol=3e-5), text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
    for thinking in (True, False):
        heddle("generate", model, "--input", write_rows(tmp_path / "in.jsonl", [{"messages": messages}]), "--output",
               tmp_path / "out.jsonl", "--temperature", 0, "--max-new-tokens", 6, "--template-arg", f"enable_thinking={thinking}".lower())
        theirs, logprobs = ids_and_logprobs(server.handle_chat_completions(
            {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True,
             "chat_template_kwargs": {"enable_thinking": thinking}}))
        ours = read_rows(tmp_path / "out.jsonl")[0]
        assert theirs == ours["output_ids"] and numpy.allclose(logprobs, ours["logprobs"], atol=3e-5)

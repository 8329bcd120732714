"""Called by bench/cpu/compare: HEDDLE TOKENIZER_DIR WORK_DIR."""
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

HEDDLE, TOKENIZER, WORK = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
THREADS = 2
torch.set_num_threads(THREADS)
SHAPES = {
    "9.5M": (dict(vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
                  linear_key_head_dim=64, linear_value_head_dim=64, tie_word_embeddings=True), 4, 512),
    "55M": (dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=128, linear_num_key_heads=4, linear_num_value_heads=8,
                 linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True), 2, 1024),
}


def product_flops(config):
    """6 per weight of the linear layers and the head, per token."""
    model = Qwen3_5ForCausalLM(config)
    return 6 * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def gemm_rate():
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    a @ b
    best = 0
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * 2048**3 / (time.perf_counter() - start))
    return best


def peer_train(folder, rows, steps):
    script = f"""
import json, resource, sys, time, torch
from transformers import Qwen3_5ForCausalLM
torch.set_num_threads({THREADS})
m = Qwen3_5ForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.float32, attn_implementation='sdpa').train()
m.config.use_cache = False
opt = torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
rows = torch.tensor(json.load(open({str(rows)!r})))
times, losses = [], []
for i in range({steps}):
    x = rows[i]
    t = time.perf_counter()
    loss = m(input_ids=x, labels=x).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step(); opt.zero_grad()
    times.append(time.perf_counter() - t); losses.append(loss.item())
print(json.dumps(dict(times=times, losses=losses, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def ours_train(folder, rows, batch, length, steps, work):
    data = work / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for step in json.load(open(rows)) for row in step))
    subprocess.run([HEDDLE, "sft", f"model.path={folder}", f"data.train={data}", "data.format=tokens", "data.packing=false",
                    f"data.max_length={length}", "data.shuffle=false", f"train.global_batch_size={batch}",
                    f"train.micro_batch_tokens={batch * length}", f"train.max_steps={steps}", "optim.lr=1e-4",
                    "optim.schedule=constant", "optim.weight_decay=0.01", "ckpt.every=0", "log.report=false",
                    "log.tensorboard=false", f"device.threads={THREADS}", f"train.output_dir={work / 'run'}",
                    "train.resume=never"], check=True, capture_output=True)
    metrics = [json.loads(line) for line in open(work / "run/metrics.jsonl")]
    return dict(times=[m["step_s"] for m in metrics], losses=[m["loss"] for m in metrics],
                peak=max(m["memory_bytes"] for m in metrics))


def peer_decode(folder, batch):
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    x = torch.randint(10, 4000, (batch, 64))
    seconds = {}
    with torch.no_grad():
        for count in (4, 4, 36):
            start = time.perf_counter()
            model.generate(x, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
            seconds[count] = time.perf_counter() - start
    return batch * 32 / (seconds[36] - seconds[4])


def ours_decode(folder, batch, work):
    generator = torch.Generator().manual_seed(2)
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input_ids": torch.randint(10, 4000, (64,), generator=generator).tolist()}) + "\n"
                               for _ in range(batch)))
    seconds = {}
    for count in (8, 8, 136):
        start = time.perf_counter()
        subprocess.run([HEDDLE, "generate", str(folder), "--input", str(prompts), "--output", str(work / "out.jsonl"),
                        "--max-new-tokens", str(count), "--temperature", "0", "--ignore-eos", "--threads", str(THREADS)],
                       check=True, capture_output=True)
        seconds[count] = time.perf_counter() - start
    return batch * 128 / (seconds[136] - seconds[8])


def main():
    rate = gemm_rate()
    print(f"matrix products: {rate / 1e9:.0f} GFLOP/s")
    for name, (shape, batch, length) in SHAPES.items():
        work = WORK / name
        folder = work / "model"
        work.mkdir()
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(**shape)
        Qwen3_5ForCausalLM(config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((pathlib.Path(TOKENIZER) / file).read_bytes())
        steps = 6
        rows = work / "rows.json"
        rows.write_text(json.dumps(torch.randint(10, 4000, (steps, batch, length)).tolist()))
        floor = product_flops(config) * batch * length / rate
        first = ours_train(folder, rows, batch, length, steps, work)
        peer = peer_train(folder, rows, steps)
        os.rename(work / "run", work / "run1")
        second = ours_train(folder, rows, batch, length, steps, work)
        ours = min(statistics.median(first["times"][1:]), statistics.median(second["times"][1:]))
        theirs = statistics.median(peer["times"][1:])
        gap = max(abs(a - b) for a, b in zip(first["losses"], peer["losses"]))
        print(f"train {name}: {batch * length / ours:.0f} tokens/s ({ours:.3f} s), transformers {batch * length / theirs:.0f} "
              f"({theirs:.3f} s): {theirs / ours:.2f} x; products alone {floor:.3f} s: {ours / floor:.2f} x; peak "
              f"{first['peak'] / 2**20:.0f} MiB against {peer['peak'] / 2**20:.0f}; largest loss difference {gap:.1e}", flush=True)
    folder = WORK / "55M/model"
    for batch in (1, 16):
        theirs = peer_decode(folder, batch)
        ours = ours_decode(folder, batch, WORK)
        print(f"decode 55M, batch {batch}: {ours:.0f} tokens/s, transformers {theirs:.0f}: {ours / theirs:.2f} x", flush=True)


main()

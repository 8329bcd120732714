"""Training options beside the Python ones: torch.optim.Muon, PEFT's LoRA+, learning rates by group, NEFTune's scale."""

import pytest
import torch

from conftest import read_rows
from test_model import hf_loss, load, token_rows, train


def steps_of(model, optimizers, steps):
    """Losses of steps with clipping at 1."""
    losses = []
    for rows in steps:
        loss = hf_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows_of_steps(count):
    return [token_rows((30, 65, 100), seed=100 + i) for i in range(count)]


def losses_of(tmp_path, model, steps, *more):
    rows = [{"input_ids": row} for step in steps for row in step]
    output = train(tmp_path, model, rows, f"train.max_steps={len(steps)}", *more, batch=3)
    return [row["loss"] for row in read_rows(output / "metrics.jsonl")]


def test_ten_muon_steps_follow_torch(models, tmp_path, monkeypatch):
    # torch orthogonalises in bfloat16 on every device, Heddle on a CPU in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    steps = rows_of_steps(10)
    mine = losses_of(tmp_path, models / "dense_tied", steps, "optim.name=muon", "optim.lr=1e-3", "optim.weight_decay=0.1",
                     "optim.no_decay=['*embed_tokens*','*conv1d*','*in_proj_a*']")
    model = load(models / "dense_tied")
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if p.ndim == 2 and min(p.shape) > 1 and "embed_tokens" not in name]
    undecayed = [p for name, p in named.items() if "in_proj_a" in name]
    kept = {id(p) for p in hidden}
    muon = torch.optim.Muon([{"params": [p for p in hidden if id(p) not in {id(u) for u in undecayed}]},
                             {"params": undecayed, "weight_decay": 0.0}],
                            lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([p for p in named.values() if id(p) not in kept], lr=1e-3, weight_decay=0)
    assert mine == pytest.approx(steps_of(model, [muon, adamw], steps), abs=2e-4)


def test_lora_plus_follows_peft(models, tmp_path):
    from peft import PeftModel
    from peft.optimizers import create_loraplus_optimizer

    steps = rows_of_steps(8)
    lora = ("train.method=lora", "adapter.rank=4", "adapter.alpha=8", "optim.lr=1e-3")
    (tmp_path / "start").mkdir()
    start = train(tmp_path / "start", models / "dense_tied", [{"input_ids": row} for row in steps[0]], "train.max_steps=1",
                  "train.method=lora", "adapter.rank=4", "adapter.alpha=8", "optim.lr=0", batch=3)
    mine = losses_of(tmp_path, models / "dense_tied", steps, *lora, "adapter.loraplus_lr_ratio=16")
    model = PeftModel.from_pretrained(load(models / "dense_tied"), start / "final", is_trainable=True)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, weight_decay=0)
    assert mine == pytest.approx(steps_of(model, [optimizer], steps), abs=1e-4)


def test_rates_by_group_follow_torch(models, tmp_path):
    steps = rows_of_steps(8)
    mine = losses_of(tmp_path, models / "dense_tied", steps, "optim.lr=1e-4", "optim.lr_embeddings=2e-3")
    model = load(models / "dense_tied")
    table = [p for name, p in model.named_parameters() if "embed_tokens" in name]
    others = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    optimizer = torch.optim.AdamW([{"params": table, "lr": 2e-3}, {"params": others}], lr=1e-4, weight_decay=0)
    assert mine == pytest.approx(steps_of(model, [optimizer], steps), abs=1e-4)

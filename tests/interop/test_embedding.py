"""Embedding models in sentence-transformers: those of Heddle loaded there, and those of others refused where they pool otherwise."""
import json

import pytest
from conftest import heddle, read_rows, write_rows
from sentence_transformers import SentenceTransformer

PAIRS = [{"query": f"question {i}", "positive": f"answer {i} of " + "x" * i} for i in range(6)]
TEXTS = ["question 3", "a", "something longer, with more than one sentence. And another."]


def vectors(tmp_path, *model):
    source = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    heddle("score", *model, "--head", "embed", "--input", source, "--output", tmp_path / "vectors.jsonl")
    return [row["embedding"] for row in read_rows(tmp_path / "vectors.jsonl")]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_was_trained_embeds_alike(models, tmp_path, method):
    data = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    final = tmp_path / "run/final"
    heddle("sft", f"model.path={models / 'dense_tied'}", "model.head=embed", f"data.train={data}", f"train.method={method}",
           "train.max_steps=3", "optim.lr=1e-2", "data.max_length=64", f"train.output_dir={tmp_path / 'run'}", "log.report=false")
    found = vectors(tmp_path, *([final] if method == "full" else [models / "dense_tied", "--adapter", final]))
    model = SentenceTransformer(str(final), device="cpu")
    assert model.max_seq_length == 64
    # One by one and as a batch, whose padding must not matter.
    for expected in ([model.encode(text) for text in TEXTS], model.encode(TEXTS)):
        for vector, other in zip(found, expected):
            assert vector == pytest.approx(other.tolist(), abs=2e-5)


def test_another_pooling_is_refused(models, tmp_path):
    heddle("sft", f"model.path={models / 'dense_tied'}", "model.head=embed",
           f"data.train={write_rows(tmp_path / 'pairs.jsonl', PAIRS)}", "train.max_steps=1", "log.report=false",
           f"train.output_dir={tmp_path / 'run'}")
    model = SentenceTransformer(str(tmp_path / "run/final"), device="cpu")
    model[1].pooling_mode = "mean"
    model.save(str(tmp_path / "mean"))
    assert "mean" in json.dumps(json.loads((tmp_path / "mean/1_Pooling/config.json").read_text()))
    source = write_rows(tmp_path / "texts.jsonl", [{"text": "a"}])
    result = heddle("score", tmp_path / "mean", "--head", "embed", "--input", source, "--output", tmp_path / "out.jsonl", check=False)
    assert result.returncode == 2
    assert "1_Pooling/config.json" in result.stderr and "pooled by mean" in result.stderr

"""heddle eval against the same sums made with transformers, and against score."""
import json
import math
import pathlib
import shutil

import pytest
import torch

from conftest import heddle, read_rows, write_rows
from test_model import load, logits_of


def evaluate(*arguments):
    return json.loads(heddle("eval", *arguments, "--json", "--threads", "1").stdout)


def test_likelihood_is_that_of_transformers(models, tmp_path):
    model = load(models / "dense_tied")
    rows = [{"text": f"question {i}", "choices": ["yes", "no", f"maybe {i}"], "answer": answer, "kind": kind}
            for i, (answer, kind) in enumerate([(0, "a"), ("no", "a"), ("C", "b"), (1, "b"), ("yes", "b")])]
    output = tmp_path / "out.jsonl"
    metrics = evaluate(models / "dense_tied", "--input", write_rows(tmp_path / "in.jsonl", rows), "--group", "kind",
                       "--output", output)
    right = []
    for row, answer in zip(read_rows(output), [0, 1, 2, 1, 0]):
        assert len(row["choice_logprobs"]) == 3
        # The tiny models have a tokenizer of bytes: the tokens can be written down.
        ids = lambda text: heddle_ids(models, tmp_path, text)
        prompt = ids(row["text"])
        for choice, found in zip(row["choices"], row["choice_logprobs"]):
            tokens = prompt + ids(" " + choice)
            logprobs = logits_of(model, tokens).log_softmax(-1)
            expected = sum(logprobs[t - 1, tokens[t]].item() for t in range(len(prompt), len(tokens)))
            assert math.isclose(found, expected, rel_tol=1e-4)
        right.append(max(range(3), key=row["choice_logprobs"].__getitem__) == answer)
    assert metrics["likelihood"] == sum(right) / 5 and metrics["rows"] == 5
    assert metrics["groups"]["a"]["likelihood"] == sum(right[:2]) / 2
    assert metrics["groups"]["b"]["rows"] == 3


def heddle_ids(models, tmp_path, text):
    source = write_rows(tmp_path / "one.jsonl", [{"text": text}])
    heddle("score", models / "dense_tied", "--input", source, "--output", tmp_path / "ids.jsonl")
    ids = read_rows(tmp_path / "ids.jsonl")[0]["input_ids"]
    return ids


def test_perplexity_is_that_of_score(models, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "two and two", "completion": " four"},
                                              {"prompt": "a", "completion": " much longer completion"}])
    metrics = evaluate(models / "dense_tied", "--input", rows, "--metric", "perplexity")
    summary = json.loads(heddle("score", models / "dense_tied", "--input", rows, "--output", tmp_path / "s.jsonl",
                                "--answers", "--json").stdout)
    name = next(key for key in summary if "answer" in key and "nll" in key)
    assert math.isclose(metrics["perplexity"], math.exp(summary[name]), rel_tol=1e-5)


def test_answers_are_judged(models, tmp_path):
    rows = [{"prompt": "one", "answer": "x"}, {"prompt": "two", "answer": "y"}]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    evaluate(models / "dense_tied", "--input", source, "--output", output, "--max-new-tokens", "5")
    said = [row["output"] for row in read_rows(output)]
    # The model's own answers are right answers.
    rows = [{**row, "answer": text} for row, text in zip(rows, said)]
    metrics = evaluate(models / "dense_tied", "--input", write_rows(source, rows), "--max-new-tokens", "5",
                       "--metric", "exact", "--metric", "f1")
    assert metrics["exact"] == 1 and metrics["f1"] == 1
    rows[0]["answer"] = "something else"
    metrics = evaluate(models / "dense_tied", "--input", write_rows(source, rows), "--max-new-tokens", "5", "--metric", "exact")
    assert metrics["exact"] == 0.5


def test_a_turn_that_calls_a_tool_is_the_text_that_the_template_writes(tmp_path):
    """A model that was taught one call answers exactly right, with and without words before it."""
    examples = pathlib.Path(__file__).resolve().parents[2] / "examples"
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"k": {"type": "string"}}}}}]
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"k": "v"}'}}
    rows = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": [call]}],
             "tools": tools} for content in (None, "So.")]
    for row in rows:
        source = write_rows(tmp_path / "in.jsonl", [row])
        heddle("init", "--preset", "small-2m", "--tokenizer", examples / "tokenizer-4k", "--output", tmp_path / "small", "--overwrite")
        heddle("sft", f"model.path={tmp_path / 'small'}", f"data.train={source}", f"train.output_dir={tmp_path / 'run'}",
               "train.max_steps=40", "optim.lr=3e-3", "device=cpu")
        output = tmp_path / "out.jsonl"
        metrics = evaluate(tmp_path / "run" / "final", "--input", source, "--metric", "exact", "--output", output, "--temperature", "0")
        assert metrics["exact"] == 1, read_rows(output)
        assert "find" in read_rows(output)[0]["output"]
        shutil.rmtree(tmp_path / "run")


def test_classifiers(models, tmp_path):
    model = load(models / "classify")
    rows = [{"input_ids": [5 + i, 60, 7], "label": i % 2} for i in range(9)]
    with torch.no_grad():
        predicted = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax().item() for row in rows]
    rows = [{**row, "kind": "ab"[i > 4]} for i, row in enumerate(rows)]
    metrics = evaluate(models / "classify", "--input", write_rows(tmp_path / "in.jsonl", rows), "--group", "kind")
    right = [p == row["label"] for p, row in zip(predicted, rows)]
    assert metrics["accuracy"] == sum(right) / 9 and metrics["rows"] == 9
    for group, part in [("a", slice(0, 5)), ("b", slice(5, 9))]:
        found = metrics["groups"][group]
        labels, said = [row["label"] for row in rows[part]], predicted[part]
        assert found["rows"] == len(labels) and found["accuracy"] == pytest.approx(sum(right[part]) / len(labels))
        f1 = []
        for c in sorted({*labels, *said}):
            hits = sum(a == b == c for a, b in zip(labels, said))
            f1.append(2 * hits / (labels.count(c) + said.count(c)))
        assert found["f1_macro"] == pytest.approx(sum(f1) / len(f1))


def test_mistakes_are_named(models, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"text": "a"}])
    for more, message in [(["--metric", "bleu"], "expected one of"), (["--answer", "gold"], "'gold' is missing"),
                          (["--group", "kind"], "'kind' is missing"), (["--metric", "likelihood"], "`choices`"),
                          (["--metric", "exact"], "no answer")]:
        result = heddle("eval", models / "dense_tied", "--input", rows, *more, check=False)
        assert result.returncode == 2 and message in result.stderr, result.stderr

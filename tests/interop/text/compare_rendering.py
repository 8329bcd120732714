#!/usr/bin/env python3
"""Renders conversations with transformers and with heddle_text_tool, and compares text and generation spans.

    compare_rendering.py TOOL TEMPLATE.jinja|FOLDER ... [--count N] [--seed S] [--strict]

Where transformers raises, heddle must raise too. Where heddle does not support a template it says so; that is counted,
and with --strict it is a failure.
"""
import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

from transformers.utils.chat_template_utils import render_jinja_template

from conversations import TOOLS, conversations

VARIABLES = [{}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "<s>", "eos_token": "</s>"},
             {"preserve_thinking": True, "add_vision_id": True, "bos_token": "<bos>", "eos_token": "<eos>"}]


def peer(case):
    has_spans = "{% generation" in case["template"] or "{%- generation" in case["template"]
    try:
        rendered, spans = render_jinja_template(
            [case["messages"]], tools=case["tools"], chat_template=case["template"],
            return_assistant_tokens_mask=has_spans, add_generation_prompt=case["add_generation_prompt"],
            **case["variables"])
    except Exception as error:  # whatever a template makes Python raise
        return {"error": f"{type(error).__name__}: {error}"}
    text = rendered[0]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return {"error": str(error)}
    found = spans[0] if has_spans else []
    return {"text": text, "spans": [[len(text[:a].encode()), len(text[:b].encode())] for a, b in found]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("templates", nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    paths = []
    for name in args.templates:
        path = pathlib.Path(name)
        paths += sorted(path.glob("*.jinja")) if path.is_dir() else [path]
    cases = []
    for path in paths:
        source = path.read_text()
        for i, messages in enumerate(conversations(args.count, args.seed)):
            for j, (tools, prompt) in enumerate([(None, False), (None, True), (TOOLS, False), (TOOLS, True)]):
                cases.append({"name": path.name, "template": source, "messages": messages, "tools": tools,
                              "add_generation_prompt": prompt, "variables": VARIABLES[(i + j) % len(VARIABLES)]})
    with tempfile.TemporaryDirectory() as folder:
        into, out = pathlib.Path(folder, "cases"), pathlib.Path(folder, "out")
        into.write_text("".join(json.dumps(case) + "\n" for case in cases))
        subprocess.run([args.tool, "render", into, out], check=True)
        ours = [json.loads(line) for line in out.open()]
    assert len(ours) == len(cases)
    counts = collections.Counter()
    shown = collections.Counter()
    failures = collections.Counter()
    for case, mine in zip(cases, ours):
        theirs = peer(case)
        if "error" in mine and "not supported" in mine["error"] and "raise_exception" not in mine["error"]:
            kind = "unsupported"
        elif "error" in mine or "error" in theirs:
            kind = "both raise" if "error" in mine and "error" in theirs else "one raises"
        else:
            kind = "equal" if mine == theirs else "different"
        counts[kind] += 1
        bad = kind in ("one raises", "different") or (kind == "unsupported" and args.strict)
        failures[case["name"]] += bad
        if (bad or kind == "unsupported") and shown[case["name"]] < 2:
            shown[case["name"]] += 1
            print(f"--- {case['name']}: {kind}\n  messages: {json.dumps(case['messages'])[:600]}")
            print(f"  variables {case['variables']} tools {bool(case['tools'])} prompt {case['add_generation_prompt']}")
            if kind == "different" and mine["text"] == theirs["text"]:
                print(f"  spans: {mine['spans']} != {theirs['spans']}")
            else:
                print(f"  heddle:       {json.dumps(mine)[:1500]}\n  transformers: {json.dumps(theirs)[:1500]}")
    print(f"{len(paths)} templates, {len(cases)} renderings:", dict(counts))
    sys.exit(1 if sum(failures.values()) else 0)


if __name__ == "__main__":
    main()

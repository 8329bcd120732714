#!/usr/bin/env python3
"""Single-thread speed of heddle_text_tool against the `tokenizers` library, on plain text, source code and mixed text.

usage: tokenizer_speed.py TOOL TOKENIZER_FOLDER [--megabytes 10] [--rounds 3]

Processor time, the two in turn, the best of the rounds; the ids are compared as well.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/interop/text"))
from tokenizers import Tokenizer  # noqa: E402

import compare_tokenizer  # noqa: E402
import corpus  # noqa: E402


def kinds(megabytes):
    size = megabytes * 1_000_000
    files = list(corpus.file_texts(60_000_000))
    code = [f for f in files if b"\ndef " in f or b"#include" in f or b"#define" in f]
    chosen = set(map(id, code))
    plain = [f for f in files if id(f) not in chosen and f[:4000].isascii() and b"\0" not in f]
    for name, documents in (("plain text", plain), ("source code", code), ("mixed text", corpus.documents(megabytes))):
        random.Random(0).shuffle(documents)
        out, total = [], 0
        for document in documents:
            if total < size:
                out.append(document)
                total += len(document)
        yield name, out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("folder")
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(pathlib.Path(args.folder, "tokenizer.json")))
    with tempfile.TemporaryDirectory() as work:
        for name, documents in kinds(args.megabytes):
            texts = [document.decode("utf-8", "replace") for document in documents]
            compare_tokenizer.write_records(f"{work}/texts", documents)
            ours, theirs = [], []
            for _ in range(args.rounds):
                begin = time.process_time()
                expected = [tokenizer.encode(text).ids for text in texts]
                theirs.append(time.process_time() - begin)
                result = subprocess.run([args.tool, "encode", args.folder, f"{work}/texts", f"{work}/ids"], check=True, capture_output=True, text=True)
                ours.append(json.loads(result.stdout)["encode_cpu_s"])
            got = [compare_tokenizer.ids_of(record) for record in compare_tokenizer.read_records(f"{work}/ids")]
            assert got == expected, "ids differ"
            megabytes = sum(map(len, documents)) / 1e6
            print(f"{name}: {megabytes:.1f} MB, {sum(map(len, got))} ids; tokenizers {megabytes / min(theirs):.2f} MB/s, "
                  f"heddle {megabytes / min(ours):.2f} MB/s, {min(theirs) / min(ours):.2f} x")


if __name__ == "__main__":
    main()

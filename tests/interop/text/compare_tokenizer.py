#!/usr/bin/env python3
"""Encodes and decodes a mixed corpus with the `tokenizers` library and with heddle_text_tool, and compares every id.

    compare_tokenizer.py TOOL [--megabytes N] [--work FOLDER] [--only NAME ...]

Prints for each tokenizer the bytes compared and the single-thread speed of both, in processor time (the library's encode()
one text at a time, no parallelism).
"""
import argparse
import json
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer  # noqa: E402

import corpus  # noqa: E402
import make_tokenizer  # noqa: E402


def write_records(path, records):
    with open(path, "wb") as out:
        for record in records:
            out.write(struct.pack("<Q", len(record)) + record)


def read_records(path):
    data = pathlib.Path(path).read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def ids_of(record):
    return list(struct.unpack(f"<{len(record) // 4}i", record))


def known_to_pcre(text):
    """Without the characters that Unicode 14, the version of Python 3.11 and of PCRE2 10.42, does not have."""
    return "".join(c for c in text if ord(c) < 0x250 or unicodedata.category(c) != "Cn")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--work")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work = pathlib.Path(args.work or tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    documents = corpus.documents(args.megabytes, args.seed)
    known = work / "tokenizers.pickle"
    if known.exists():
        folders = pickle.loads(known.read_bytes())
    else:
        folders = make_tokenizer.variants(documents, work)
        known.write_bytes(pickle.dumps(folders))
    all_texts = [document.decode("utf-8", "replace") for document in documents]
    old_texts = [known_to_pcre(text) for text in all_texts]
    failed = False
    for name, folder in folders.items():
        if args.only and name not in args.only:
            continue
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        by_pcre = name in ("regex", "prefix-space")
        texts = old_texts if by_pcre else all_texts
        write_records(work / "texts", [text.encode() for text in texts] if by_pcre else documents)
        begin = time.process_time()
        theirs = [tokenizer.encode(text).ids for text in texts]
        their_s = time.process_time() - begin
        result = subprocess.run([args.tool, "encode", folder, work / "texts", work / "ids"], check=True, capture_output=True, text=True)
        timing = json.loads(result.stdout)
        ours = [ids_of(record) for record in read_records(work / "ids")]
        assert len(ours) == len(theirs)
        wrong = [i for i in range(len(texts)) if ours[i] != theirs[i]]
        size = timing["bytes"] / 1e6
        print(f"{name}: {len(texts)} texts, {size:.1f} MB, {sum(map(len, theirs))} ids, {len(wrong)} texts differ; "
              f"tokenizers {size / their_s:.2f} MB/s, heddle {size / timing['encode_cpu_s']:.2f} MB/s = {their_s / timing['encode_cpu_s']:.2f} x; "
              f"load {timing['load_s']:.3f} s")
        for i in wrong[:3]:
            at = next(k for k in range(len(theirs[i]) + 1) if ours[i][: k + 1] != theirs[i][: k + 1])
            print("  text", i, "first difference at id", at, "ours", ours[i][at - 2 : at + 6], "theirs", theirs[i][at - 2 : at + 6],
                  "before", repr(tokenizer.decode(theirs[i][max(0, at - 8) : at], skip_special_tokens=False)), "after",
                  repr(tokenizer.decode(theirs[i][at : at + 8], skip_special_tokens=False)),
                  [tokenizer.id_to_token(t) for t in ours[i][at : at + 4]])
        # Decoding: the ids just made, and random ones, whose bytes are often no UTF-8.
        rng = random.Random(args.seed)
        sequences = theirs[::5] + [[rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(50))] for _ in range(3000)]
        write_records(work / "ids", [struct.pack(f"<{len(s)}i", *s) for s in sequences])
        subprocess.run([args.tool, "decode", folder, work / "ids", work / "decoded"], check=True)
        decoded = [record.decode() for record in read_records(work / "decoded")]
        expected = [tokenizer.decode(s, skip_special_tokens=False) for s in sequences]
        wrong_decodes = [i for i in range(len(sequences)) if decoded[i] != expected[i]]
        if wrong_decodes:
            i = wrong_decodes[0]
            print(f"  {len(wrong_decodes)} of {len(sequences)} decodings differ, e.g. {sequences[i][:40]}: {decoded[i][:80]!r} {expected[i][:80]!r}")
        failed |= bool(wrong or wrong_decodes)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Trains byte-level BPE tokenizers of the forms that the Qwen family ships, on the corpus of corpus.py."""
import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|vision_start|>",
           "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<tool_response>", "</tool_response>",
         "<think>", "</think>"]


def train(texts, vocab_size, pattern, special=SPECIAL, plain=PLAIN):
    """A tokenizer whose ids, added tokens included, are 0 .. vocab_size - 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(special) - len(plain), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return tokenizer


def save(tokenizer, folder, string_merges=False, **changes):
    """Writes tokenizer.json; `changes` replace top-level keys or, with a dotted name, deeper ones."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    if string_merges:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        place[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    return folder


def variants(documents, folder, large=32768):
    """Folders of tokenizers that differ in what the reader has to understand."""
    folder = pathlib.Path(folder)
    # A long run of one character makes tokens of half its length, which no tokenizer has and which are refused as keys.
    texts = [text for d in documents if len(set(text := d.decode("utf-8", "replace"))) > 2]
    small = train(texts[::7], 4096, QWEN2)
    out = {"qwen2-4k": save(small, folder / "qwen2-4k", string_merges=True)}
    big = train(texts[::3], large, QWEN35)
    out["qwen35-large"] = save(big, folder / "qwen35-large")
    flags = Tokenizer.from_str(small.to_str())
    flags.add_tokens([
        AddedToken("lstr", lstrip=True, normalized=False), AddedToken("rstr", rstrip=True, normalized=False),
        AddedToken(" both ", lstrip=True, rstrip=True, normalized=False), AddedToken("word", single_word=True, normalized=False),
        AddedToken("e\u0301", normalized=True), AddedToken("im", normalized=True), AddedToken("<|im", normalized=False),
        AddedToken("\u00e9\u00e8", normalized=False), AddedToken("the", single_word=True, normalized=True),
        AddedToken("self", lstrip=True, rstrip=True, single_word=True, normalized=True)])
    out["flags"] = save(flags, folder / "flags")
    out["ignore-merges"] = save(small, folder / "ignore-merges", model__ignore_merges=True, model__merges=json.loads(small.to_str())["model"]["merges"][::2])
    digits = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    out["digits-3"] = save(small, folder / "digits-3", pre_tokenizer=digits)
    regex = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": "--"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"[A-Za-z]+| ?[^\sA-Za-z]+|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    out["regex"] = save(small, folder / "regex", pre_tokenizer=regex)
    out["prefix-space"] = save(small, folder / "prefix-space", normalizer=None,
                               pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
    out["nfkc"] = save(small, folder / "nfkc", normalizer={"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFKC"}]})
    return out

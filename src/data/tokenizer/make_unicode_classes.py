#!/usr/bin/env python3
"""Writes unicode_classes.inc: which code points the `tokenizers` library takes as letters, numbers, marks and space.

The library asks its own regular-expression engine, whose Unicode version is newer than that of the packaged PCRE2 and
ICU, so the tables are read off the library itself. Run with a Python that has `tokenizers`; prints to stdout.
"""
import unicodedata

from tokenizers import Regex, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for i in range(0, len(CODE_POINTS), 2000):
        chunk = CODE_POINTS[i : i + 2000]
        kept = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, chunk))):
            kept.update(range(begin, end))
        found.update(c for j, c in enumerate(chunk) if j not in kept)
    return found


def ranges(codes):
    codes = sorted(codes)
    begin = previous = codes[0]
    for code in codes[1:] + [None]:
        if code != previous + 1:
            yield begin, previous
            begin = code
        previous = code


def table(name, codes):
    print(f"constexpr CodeRange k{name}[] = {{")
    line = "   "
    for begin, end in ranges(codes):
        item = f" {{0x{begin:X}, 0x{end:X}}},"
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line + "\n};")


def may_change_under_nfc(code):
    char = chr(code)
    if unicodedata.combining(char) or unicodedata.normalize("NFC", char) != char:
        return True
    # A second part of a composition: Hangul vowels and finals, and every character that follows a starter in one.
    return 0x1161 <= code <= 0x1175 or 0x11A8 <= code <= 0x11C2 or code in SECOND


SECOND = set()
for c in CODE_POINTS:
    parts = unicodedata.decomposition(chr(c)).split()
    if len(parts) == 2 and not parts[0].startswith("<"):
        SECOND.add(int(parts[1], 16))

print("// Written by make_unicode_classes.py; do not edit.")
print("// clang-format off")
marks = members(r"\p{M}")
table("Letters", members(r"\p{L}"))
table("Numbers", members(r"\p{N}"))
table("Marks", marks)
table("Spaces", members(r"\s"))
table("NfcChangeable", marks | {c for c in CODE_POINTS if may_change_under_nfc(c)})
print("// clang-format on")

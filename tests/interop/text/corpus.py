"""Mixed text for comparing tokenizers: what a Debian machine with Python has at hand, and generated text."""
import gzip
import pathlib
import random
import sysconfig
import unicodedata

# Blocks whose characters are drawn at random: scripts, combining marks, symbols, emoji, private use, controls.
BLOCKS = [(0x20, 0x7E), (0x00, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
          (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE7F), (0x1100, 0x11FF),
          (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x20FF), (0x2100, 0x22FF), (0x2500, 0x27BF), (0x3000, 0x30FF),
          (0x3130, 0x318F), (0x4E00, 0x9FFF), (0xAC00, 0xD7AF), (0xE000, 0xE0FF), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
          (0xFE00, 0xFE0F), (0xFF00, 0xFFEF), (0x10400, 0x1044F), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF),
          (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0100, 0xE01EF), (0x0, 0x10FFFF)]
PIECES = ["'s", "'S", "'ll", "'LL", "'re", "'Ve", "'d", "'m", "'t", "'\u017f", "''", "\n", "\r\n", "\n\n", " \n ", "\t", "  ", "   ",
          " ", "\u00a0", "\u3000", "\u180e", "\u2028", "\u0085", "\x1c", "123", "4", "0.5e-3", "٣٤", "½", "Ⅷ", "<|im_start|>", "<|im_end|>",
          "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|im_start", "|>", "<", "\u0301", "e\u0301", "\u0345", "\ufffd", "\u0000",
          "\u200d", "👩‍👩‍👧", "🇨🇭", "한국", "各", "가", "각", "ﬁ", "Å", "_", "--", "...", "!?\n", "=>", "()", "\u0e33", "क्ष", "ß", "İ", "ǅ"]


def file_texts(limit):
    """Files of the machine, as bytes."""
    roots = [(pathlib.Path(sysconfig.get_paths()["stdlib"]), ("*.py",)), (pathlib.Path("/usr/share/common-licenses"), ("*",)),
             (pathlib.Path("/usr/share/doc"), ("*.txt", "copyright", "README*", "*.html")),
             (pathlib.Path("/usr/share/man"), ("*.gz",)), (pathlib.Path("/usr/share/i18n/locales"), ("*",)),
             (pathlib.Path("/usr/include"), ("*.h",)), (pathlib.Path("/usr/share/locale"), ("*.mo",))]
    share = limit // len(roots)
    for root, patterns in roots:
        total = 0
        for path in sorted(p for pattern in patterns for p in root.rglob(pattern)):
            if not path.is_file() or path.stat().st_size > 300_000 or total > share:
                continue
            try:
                data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
            except OSError:
                continue
            total += len(data)
            yield data


def unicode_names():
    """The name of every character next to the character."""
    lines = []
    for code in range(0x110000):
        char = chr(code)
        name = unicodedata.name(char, "")
        if name and not (0x3400 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7A3 or code >= 0x20000):
            lines.append(f"{char}\t{name.title()} U+{code:04X} {unicodedata.normalize('NFD', char)}")
    return "\n".join(lines)


def random_text(rng, characters):
    out = []
    block = rng.choice(BLOCKS)
    while characters > 0:
        kind = rng.random()
        if kind < 0.25:
            piece = rng.choice(PIECES)
        elif kind < 0.4:
            block = rng.choice(BLOCKS)
            piece = " "
        elif kind < 0.45:
            piece = rng.choice([" ", "a", "\n", "ab", "\u0301", "1", "-", "é", "的"]) * rng.randrange(1, 60)
        else:
            piece = "".join(chr(rng.randint(*block)) for _ in range(rng.randrange(1, 12)))
            piece = "".join(c for c in piece if not 0xD800 <= ord(c) < 0xE000)
        out.append(piece)
        characters -= len(piece)
    return "".join(out)


def random_bytes(rng, length):
    """Text with bytes that are not UTF-8: cut, overlong, surrogate, beyond the last plane, or noise."""
    data = bytearray(random_text(rng, length).encode())
    for _ in range(len(data) // 20 + 1):
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.choice([b"\xff", b"\xc0\xaf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98", b"\xe2\x82",
                                  b"\x80", b"\xf8\x88\x80\x80\x80", bytes([rng.randrange(256)])])
    return bytes(data)


def documents(megabytes, seed=0):
    """About that much text as byte strings of uneven length; the same for the same seed on the same machine."""
    rng = random.Random(seed)
    size = megabytes * 1_000_000
    out = list(file_texts(int(size * 0.62)))
    names = unicode_names().encode()
    out += [names[i : i + 50_000] for i in range(0, len(names), 50_000)]
    total = sum(map(len, out))
    out += [b"", b" ", b"a", b"\xff", "é".encode() * 20_000, b"a" * 100_000, b" " * 100_000, b"\n" * 50_000, b"ab" * 50_000, b"1" * 50_000]
    while total < size:
        document = random_bytes(rng, rng.randrange(1, 6000)) if rng.random() < 0.3 else random_text(rng, rng.randrange(1, 9000)).encode()
        out.append(document)
        total += len(document)
    rng.shuffle(out)
    return out

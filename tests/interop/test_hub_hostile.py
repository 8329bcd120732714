"""Answers of a hub that means ill, or of a proxy in its place: one line and status 2 or 1, nothing outside the cache, no memory or
disk without bound."""
import json
import resource
import subprocess

import pytest

from conftest import HEDDLE
from hub_server import COMMIT, Hub, git_hash
from test_hub import World

FILE = {"type": "file", "oid": "0" * 40, "size": 5, "path": "config.json"}
SHA = json.dumps({"sha": COMMIT}).encode()


def listing(**more):
    return json.dumps([FILE | more]).encode()


BODIES = {
    "no JSON": ("/revision/", b"<html>sign in</html>"),
    "a list instead of facts": ("/revision/", b"[1, 2]"),
    "brackets": ("/revision/", b"[" * 100000),
    "a commit that is a path": ("/revision/", json.dumps({"sha": "../../../../tmp/x"}).encode()),
    "a commit that is a number": ("/revision/", b'{"sha": 7}'),
    "files that are numbers": ("/tree/", b"[1, 2, 3]"),
    "an object instead of files": ("/tree/", b'{"error": "\\u001b[2J"}'),
    "a path that is a list": ("/tree/", listing(path=["a"])),
    "an absolute path": ("/tree/", listing(path="/etc/cron.d/x")),
    "dots within": ("/tree/", listing(path="a/../../../b.json")),
    "a zero byte": ("/tree/", listing(path="config.json\0.txt")),
    "an escape": ("/tree/", listing(path="\x1b[2J/../x")),
    "a negative size": ("/tree/", listing(size=-1)),
    "a size of 2^64 - 1": ("/tree/", listing(size=2**64 - 1)),
    "a size that is no whole number": ("/tree/", listing(size=1e300)),
    "a hash that is a path": ("/tree/", listing(oid="../../../../tmp/hash-of-forty-characters.")),
    "a large file with a size as text": ("/tree/", listing(lfs={"oid": "0" * 64, "size": "5"})),
    "a file without end": ("/resolve/", None),
    "facts without end": ("/revision/", None),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_refused_in_one_line(tmp_path, name):
    part, body = BODIES[name]
    with Hub({"org/tiny": {"config.json": b"{}   ", "model.safetensors": b"12345678"}},
             faults={part: ("endless",) if body is None else ("body", body)}) as hub:
        world = World(tmp_path, hub)
        before = set(tmp_path.parent.iterdir())

        def limited():
            resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

        words = [HEDDLE, "score", "org/tiny", "--input", world.rows, "--output", world.out]
        result = subprocess.run(list(map(str, words)), capture_output=True, env=world.environment, preexec_fn=limited, timeout=120)
        text = result.stderr.decode()
        assert result.returncode == 2, (result.returncode, text)
        assert text.startswith("error: ") and text.count("\n") == 1 and len(text) < 4000, text
        assert "\x1b" not in text
        assert hub.sent < 200 << 20
        assert set(tmp_path.parent.iterdir()) == before
        written = sum(p.stat().st_size for p in world.home.rglob("*") if p.is_file()) if world.home.exists() else 0
        assert written < 1 << 20


@pytest.mark.parametrize("words", ["\x1b[2Jgone", "\x9b31mred", "a\x08\x08b", "\x1b]0;title\x07", "x" * 60000])
def test_words_of_a_header_are_not_obeyed(tmp_path, words):
    with Hub({"org/tiny": {"config.json": b"{}"}}, faults={"/revision/": ("header", {"X_Error_Message": words})}) as hub:
        result = World(tmp_path, hub).score("org/tiny")
        assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
        assert not any(ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160 for c in result.stderr), result.stderr
        assert len(result.stderr) < 6000


def test_a_list_of_pages_without_end_ends(tmp_path):
    """Each page names itself as the next one."""
    page = json.dumps([{"type": "file", "oid": git_hash(b"%d" % i), "size": 1, "path": f"a/{i}.txt"} for i in range(3000)]).encode()
    with Hub({"org/tiny": {"config.json": b"{}"}}) as hub:
        world = World(tmp_path, hub)

        class Endless(hub.server.RequestHandlerClass):
            def answer(self):
                if "/tree/" in self.path:
                    return self.send(200, page, Link=f'<{hub.url}{self.path}>; rel="next"')
                return super().answer()

        hub.server.RequestHandlerClass = Endless
        result = world.score("org/tiny")
        assert result.returncode == 2, result.stderr
        assert "more than 1000000 files" in result.stderr

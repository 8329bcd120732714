"""Token ids and chat renderings against `tokenizers` and `transformers`. HEDDLE_TEXT_TOOL: the program of tests/interop/text;
HEDDLE_TEXT_MEGABYTES: size of the corpus (24 for the full comparison)."""
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests/interop/text"
TOOL = os.environ.get("HEDDLE_TEXT_TOOL", str(ROOT / "build/cpu/tests/interop/text/heddle_text_tool"))


def run(script, *arguments):
    result = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_token_ids_and_decodings_are_equal(tmp_path):
    print(run(TEXT / "compare_tokenizer.py", TOOL, "--megabytes", os.environ.get("HEDDLE_TEXT_MEGABYTES", 3), "--work", tmp_path))


def test_renderings_are_equal():
    run(TEXT / "compare_rendering.py", TOOL, ROOT / "examples/tokenizer-4k", TEXT / "templates", "--strict", "--count", 60)


@pytest.mark.parametrize("script", [TEXT / "make_golden.py", ROOT / "scripts/make-example-tokenizer"])
def test_checked_in_files_are_what_the_scripts_make(script):
    run(script, "--check")

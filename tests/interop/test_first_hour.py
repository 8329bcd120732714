"""The commands of docs/first-hour.md as they are printed, with a small model in place of the hub's."""
import json
import os
import pathlib
import re
import subprocess

from conftest import HEDDLE, ROOT, heddle
from hub_server import Hub

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def conversation(i):
    city = ["Oslo", "Rome", "Lima"][i % 3]
    call = {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
    return {"messages": [{"role": "user", "content": f"Weather in {city}?"},
                         {"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"celsius": i})},
                         {"role": "assistant", "content": f"It is {i} degrees in {city}."}], "tools": TOOLS}


def test_every_command_works_as_printed(tmp_path):
    page = (ROOT / "docs" / "first-hour.md").read_text()
    row = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    commands = re.findall(r"^    (\S.*)$", page, re.M)
    assert len(commands) >= 10
    heddle("init", "--preset", "small-2m", "--tokenizer", ROOT / "examples/tokenizer-4k", "--output", tmp_path / "small")
    work, programs = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    programs.mkdir()
    (programs / "heddle").symlink_to(pathlib.Path(HEDDLE).resolve())
    (work / "tools.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [row, *map(conversation, range(41))]))
    # Other tests keep Python's libraries away from the network.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    files = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    with Hub({"Qwen/Qwen3.5-0.8B": files}) as hub:
        for command in commands:
            result = subprocess.run(
                command, shell=True, cwd=work, capture_output=True, text=True, input="Weather in Rome?\n",
                env={**outside, "PATH": f"{programs}:{os.environ['PATH']}", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")})
            assert result.returncode == 0, f"{command}\n{result.stderr}"
            assert "warning" not in result.stderr or "the answer is cut" in result.stderr, f"{command}\n{result.stderr}"
    for made in ["runs/tools/report.html", "runs/tools/final/adapter_model.safetensors", "models/tools/model.safetensors",
                 "models/tools.gguf"]:
        assert (work / made).stat().st_size > 0, made
    judged = [json.loads(line) for line in (work / "judged.jsonl").read_text().splitlines()]
    assert len(judged) == 20 and all("output" in row and "metrics" in row for row in judged)

"""Conversations that a chat template has to cope with: system prompts, tools, thinking, tool results, content parts."""
import random

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather at a place, e.g. <Zürich> & \"San José\"",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City name\nor postcode"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 3},
                    "unit": {"type": "string", "enum": ["°C", "°F"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {
                        "type": "object",
                        "properties": {"verbose": {"type": "boolean"}, "scale": {"type": "number"}},
                    },
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(name, arguments, identity="call_1"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(content):
    return {"type": "text", "text": content}


FIXED = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}],
    [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "<think>\nFirst.\n\nThen.\n</think>\n\nDone."},
        {"role": "user", "content": "  Again \n"},
        {"role": "assistant", "content": "\nYes. \n", "reasoning_content": "\nBecause.\n"},
    ],
    [
        {"role": "system", "content": "Sys"},
        {"role": "user", "content": "Weather in Zürich and 東京 🌧?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need both.",
            "tool_calls": [
                call("get_weather", {"city": "Zürich", "days": 2, "tags": ["a", "b"], "options": {"verbose": True, "scale": 1.50}}),
                call("get_weather", {"city": "東京\n\"x\"", "unit": None}, "call_2"),
            ],
        },
        {"role": "tool", "name": "get_weather", "tool_call_id": "call_1", "content": "{\"temp\": 12.5}"},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call_2", "content": "rain"},
        {"role": "assistant", "content": "12.5 and rain."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "<think>\n\n</think>\n\nYou're welcome"},
    ],
    [
        {"role": "user", "content": [text("What is "), text("this?\n")]},
        {"role": "assistant", "content": [text("A text.")]},
        {"role": "user", "content": [text("And now?")]},
    ],
    [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I call.", "tool_calls": [call("now", {})]},
        {"role": "tool", "content": [text("12:00")], "tool_call_id": "call_1"},
    ],
    [
        {"role": "user", "content": "Arguments as text"},
        {"role": "assistant", "content": None, "tool_calls": [call("get_weather", "{\"city\": \"Ulm\"}")]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "user", "content": "<tool_response>\nnot a query\n</tool_response>"},
    ],
    [{"role": "system", "content": "Only system."}],
    [{"role": "assistant", "content": "Starts with the assistant."}],
    [{"role": "user", "content": [{"type": "image", "image": "x.png"}, text("What is on it?")]}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "late system"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "x", "extra": [1, 2.5, None, True, {"k": []}]}, {"role": "assistant", "thinking": "old name", "content": "y"}],
]

WORDS = ["alpha", "Beta\n", " gamma ", "</think>", "<think>", "{{ x }}", "{% if %}", "日本語", "e\u0301", "🙂", "\"quoted\"", "it's",
         "\\n", "\t", "<|im_end|>", "1.0", "&amp;", "\u00a0", "\u2028", "ß", "ǆ"]


def random_conversation(rng):
    def words():
        return "".join(rng.choice(WORDS) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(0, 6)))

    in_parts = rng.random() < 0.15

    def content():
        return [text(words()) for _ in range(rng.randrange(1, 3))] if in_parts and rng.random() < 0.5 else words()

    def value(depth=0):
        kind = rng.randrange(8 if depth < 2 else 6)
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 7:
            return {rng.choice(WORDS): value(depth + 1) for _ in range(rng.randrange(3))}
        return [None, True, rng.randrange(-1000, 1000), rng.uniform(-1, 1) * 10 ** rng.randrange(-8, 20), words(), 0.0][kind]

    out = []
    if rng.random() < 0.5:
        out.append({"role": "system", "content": content()})
    for turn in range(rng.randrange(1, 5)):
        out.append({"role": "user", "content": content()})
        if turn and rng.random() < 0.2:
            break
        for step in range(rng.randrange(0, 3)):
            calls = [call(rng.choice(["get_weather", "now"]), {rng.choice(["city", "days", "x y"]): value() for _ in range(rng.randrange(3))}, f"c{i}")
                     for i in range(rng.randrange(1, 3))]
            message = {"role": "assistant", "content": content(), "tool_calls": calls}
            if rng.random() < 0.5:
                message["reasoning_content"] = words()
            out.append(message)
            for one in calls:
                out.append({"role": "tool", "name": one["function"]["name"], "tool_call_id": one["id"], "content": content()})
        message = {"role": "assistant", "content": content()}
        if rng.random() < 0.5:
            message["reasoning_content"] = words()
        out.append(message)
    return out


def conversations(count, seed=0):
    rng = random.Random(seed)
    return FIXED + [random_conversation(rng) for _ in range(count)]

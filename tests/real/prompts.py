"""Over a hundred chat requests in six chat templates of different kinds, the same on every run."""

import pathlib
import random

TEMPLATES = {p.stem: p.read_text() for p in sorted((pathlib.Path(__file__).parent / "templates").glob("*.jinja"))}

TEXTS = [
    "Say hello.",
    "  What's the capital of Zürich canton?  \n",
    "用中文回答:今天天气怎么样?",
    "Résumé, naïve, Ångström — “quotes” ‘single’ … and tabs\tand\nnew lines\n\n",
    "🙂👩‍👩‍👧 flags 🇩🇪 x×y ½ ² Ⅷ",
    "<b>HTML & \"quotes\" 'single'</b> \\ back\\slash",
    "<|user|> not a role <|end|> </s> <s> [INST] </think> <think>",
    "السلام عليكم สวัสดี नमस्ते 안녕하세요 こんにちは",
    "def f(x):\n    return {'a': [1, 2.5, None]}\n",
    "cafe\u0301 \u212b \ufb01 \u00a0nbsp\u2003em\u3000ideo",
    "9" * 40 + " 1,234,567.89 0x1F -42e10",
    "A long question. " * 60,
]

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Weather in a city: <°C> & \"wind\"",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "e.g. Zürich"},
            "days": {"type": "integer", "minimum": 1, "default": 3},
            "units": {"type": "string", "enum": ["°C", "°F"]}}}}},
    {"type": "function", "function": {
        "name": "search", "strict": True,
        "parameters": {"type": "object", "additionalProperties": False, "properties": {
            "query": {"type": ["string", "null"], "description": "words"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limits": {"type": "object", "additionalProperties": {"type": "number"}},
            "score": {"type": "number", "multipleOf": 0.00001, "maximum": 1e20}}}}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]

CALL = {"id": "call_abcdefghi", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Zürich\", \"days\": 2, \"f\": 1.0, \"n\": null, \"s\": \"a\\n\\\"b\\\"\"}"}}
EMPTY_CALL = {"id": "call_123456789", "type": "function", "function": {"name": "now", "arguments": ""}}


def turns(r, n, system=True):
    """A conversation of n user turns, with answers between."""
    out = [{"role": "system", "content": r.choice(TEXTS)}] if system else []
    for i in range(n):
        if i:
            out.append({"role": "assistant", "content": r.choice(TEXTS)})
        out.append({"role": "user", "content": r.choice(TEXTS)})
    return out


def parts(r, n):
    return [{"type": "text", "text": r.choice(TEXTS)} for _ in range(n)]


def kinds(r, name):
    """Requests of every kind, for one template."""
    lists = [{"role": "system", "content": parts(r, 1)}, {"role": "user", "content": parts(r, 2)}]
    tool_turn = turns(r, 1) + [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "rain, 12 °C"},
    ]
    two_calls = turns(r, 2, system=False) + [
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL] if name == "headers" else [CALL, EMPTY_CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "12 °C"}]},
        {"role": "tool", "tool_call_id": EMPTY_CALL["id"], "name": "now", "content": "12:00"},
        {"role": "assistant", "content": "<think>\nhm, rain\n</think>\n\nIt rains."},
        {"role": "user", "content": "Thanks! " + r.choice(TEXTS)},
    ]
    opened = turns(r, 2) + [{"role": "assistant", "content": "It is called Zürich and  "}]
    reasoning = turns(r, 1) + [{"role": "assistant", "content": "yes", "reasoning": "\nshort thought é\n"}]
    yield {"messages": turns(r, 1)}
    yield {"messages": turns(r, 1, system=False)}
    yield {"messages": turns(r, 4)}
    yield {"messages": lists}
    yield {"messages": turns(r, 1) + [{"role": "assistant", "content": parts(r, 2)}, {"role": "user", "content": [r.choice(TEXTS), *parts(r, 1)]}]}
    yield {"messages": tool_turn, "tools": TOOLS[:1]}
    yield {"messages": two_calls, "tools": TOOLS}
    yield {"messages": turns(r, 2), "tools": TOOLS[1:]}
    yield {"messages": opened, "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": lists + [{"role": "assistant", "content": parts(r, 2)}], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": turns(r, 1), "add_generation_prompt": False}
    yield {"messages": turns(r, 1), "chat_template_kwargs": {"enable_thinking": False, "thinking": True, "persona": "Du bist Zoë.", "date_string": "1 Jan 2026", "unused": [1]}}
    yield {"messages": reasoning + [{"role": "user", "content": "And?"}]}
    yield {"messages": reasoning, "add_generation_prompt": False, "chat_template_kwargs": {"documents": [{"title": "el niño", "text": " warm\nwater "}, {"text": "x"}]}}
    yield {"messages": turns(r, 1) + [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "ok"}]}
    yield {"messages": turns(r, 1), "add_special_tokens": True}
    yield {"messages": turns(r, 9)}
    yield {"messages": turns(r, 1, system=False) + [{"role": "assistant", "content": ""}, {"role": "user", "content": [*parts(r, 3), {"type": "text", "text": ""}]}]}
    yield {"messages": turns(r, 3), "chat_template_kwargs": {"shout": True, "custom_tools": TOOLS[:1], "none": None, "automatic": "auto"}}


def cases(count=1_000, seed=7):
    """(template name, body) pairs; every template gets every kind, in turn."""
    r = random.Random(seed)
    streams = {name: list(kinds(r, name)) for name in TEMPLATES}
    out = []
    for i in range(max(map(len, streams.values()))):
        for name, bodies in streams.items():
            if i < len(bodies) and len(out) < count:
                out.append((name, {"model": "tiny", "chat_template": TEMPLATES[name], **bodies[i]}))
    return out

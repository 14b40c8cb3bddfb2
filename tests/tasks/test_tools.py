"""Tools: their schemas, the calls of each family of models, and tools that fail in every way."""

import asyncio
import enum
import json
import threading
import time
import types
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from solera.errors import SoleraError
from solera.tasks.agent import Agent
from solera.tasks.conversation import Limits
from solera.tasks.mcp_tools import Connection, McpTool
from solera.tasks.schema import schema_of
from solera.tasks.shipped_tools import calculator, folder_search, python
from solera.tasks.tool_calls import Call, format_of, hermes, llama, mistral
from solera.tasks.tools import Toolbox
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer, waiting_tool
from tests.tasks.test_conversation import Scripted


def plain(text: str, count: int = 3, ratio: float = 0.5, deep: bool = False):
    """
    Repeat a text.

    Args:
        text: The text. It may
            take two lines.
        count: How often.
        ratio: Some number.
        deep: Whether to go on.

    Returns:
        The text.
    """


def nested(names: list[str], table: dict[str, int], either: int | str, perhaps: float | None = None) -> str:
    """Take everything.

    Args:
        names: Some names.
        table: A table: with a colon.
        either: One or the other.
        perhaps: Or nothing.
    """


def nothing():
    """Do nothing."""


@pytest.mark.parametrize("function", [plain, nested, nothing, calculator, python])
def test_schemas_are_those_of_transformers(function):
    wanted = get_json_schema(function)["function"]
    wanted.pop("return", None)
    found = schema_of(function)["function"]
    squeezed = json.loads(json.dumps(wanted), object_hook=_squeeze)
    assert json.loads(json.dumps(found), object_hook=_squeeze) == squeezed


def _squeeze(found: dict) -> dict:
    """transformers keeps line breaks in descriptions."""
    return {key: " ".join(v.split()) if key == "description" else v for key, v in found.items()}


def test_choices_and_mistakes_in_signatures():
    class Unit(enum.Enum):
        C = "celsius"
        F = "fahrenheit"

    def weather(city: str, unit: Unit, way: Literal["now", "later"] = "now"):
        """Tell the weather."""

    properties = schema_of(weather)["function"]["parameters"]["properties"]
    assert properties["unit"] == {"type": "string", "enum": ["celsius", "fahrenheit"]}
    assert properties["way"] == {"type": "string", "enum": ["now", "later"]}
    assert schema_of(weather)["function"]["parameters"]["required"] == ["city", "unit"]

    def silent(a: int): ...
    def untyped(a):
        """Do."""

    def open_ended(*a: int):
        """Do."""

    def strange(a: threading.Thread):
        """Do."""

    for function, complaint in (
        (silent, "tool silent has no docstring"), (untyped, "tool untyped: parameter a has no type hint"),
        (open_ended, "cannot be given by name"), (strange, "a tool takes str, int"),
    ):  # fmt: skip
        with pytest.raises(SoleraError, match=complaint):
            schema_of(function)
    with pytest.raises(SoleraError, match="two of them have the same name"):
        Toolbox([nothing, nothing])


ADD = Call("add", {"a": 1, "b": [2, "}"]})
JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'


@pytest.mark.parametrize(
    ("parse", "text", "calls"),
    [
        (hermes, "no call", []),
        (hermes, f"<think>\nnot <tool_call>{JSON}</tool_call>\n</think>\n\nyes", []),
        (hermes, f"<think>a</think><tool_call>\n{JSON}\n</tool_call>\n<tool_call>{JSON}</tool_call>", [ADD, ADD]),
        (hermes, f"<tool_call>\n{JSON}", [ADD]),
        (hermes, f"<think>\nI could call\n<tool_call>{JSON}</tool_call>", []),
        (hermes, f"<tool_call>{JSON}</tool_call><think>or <tool_call>{JSON}</tool_call>", [ADD]),
        (hermes, '<tool_call>{"name": "a", "arguments": {"b": "<think>"}}</tool_call>', [Call("a", {"b": "<think>"})]),
        (llama, JSON.replace("arguments", "parameters"), [ADD]),
        (llama, f"<|python_tag|>{JSON}; {JSON}", [ADD, ADD]),
        (llama, '{"answer": 4}', []),
        (llama, f"I call {JSON}", []),
        (mistral, f"[TOOL_CALLS][{JSON}, {JSON}]", [ADD, ADD]),
        (mistral, f"[TOOL_CALLS] [{JSON[:-1]}, \"id\": \"abcdefghi\"}}]", [ADD._replace(id="abcdefghi")]),
        (mistral, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": [2, "}"]}', [ADD._replace(id="abcdefghi")]),
        (mistral, "add(1)", []),
    ],
)  # fmt: skip
def test_calls_of_each_family(parse, text, calls):
    assert parse(text) == calls


@pytest.mark.parametrize(
    ("parse", "text"),
    [(hermes, "<tool_call>{'name': 'add'}</tool_call>"), (hermes, "<tool_call>[1]</tool_call>"),
     (hermes, '<tool_call>{"name": "a", "arguments": 3}</tool_call>'), (hermes, '<tool_call>{"name": 7}</tool_call>'),
     (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>"), (llama, '{"name": "add", "parameters": {'),
     (mistral, '[TOOL_CALLS][{"name": '), (mistral, "[TOOL_CALLS]add[ARGS]{a: 1}")],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_told_to_the_model(parse, text):
    (call,) = parse(text)
    assert call.mistake and "\n" not in call.mistake
    (result,) = asyncio.run(Toolbox([calculator]).answer([call], 9.0))
    assert result.failed and result.text == f"error: {call.mistake}"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3_1", "llama"), ("mistral_nemo", "mistral"),
     ("gemma3", "text"), ("smollm2", "text")],
)  # fmt: skip
def test_the_template_tells_the_format_and_tools_are_used(name, wanted):
    """Two calls in one turn where the format allows it, answered in order, then an answer."""
    template = TEMPLATES[name]
    tokenizer = small_tokenizer(template)
    codec = codec_of(tokenizer, template)
    assert format_of(codec).name == wanted
    one, two = ({"name": "calculator", "arguments": {"expression": text}} for text in ("6*7", "1/0"))
    said = {
        "hermes": "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in (one, two)),
        "llama": json.dumps({"name": "calculator", "parameters": one["arguments"]}),
        "mistral": f"[TOOL_CALLS]{json.dumps([one, two])}",
    }
    said["text"] = said["hermes"]
    agent = Agent(codec, [calculator], Limits(turns=5))
    prompt, script = agent.prompt("p", "6*7?", answer="42"), Scripted(tokenizer, said[wanted], "It is 42.")
    assert "calculator" in tokenizer.decode(prompt.token_ids)
    chat = asyncio.run(agent.talk(prompt, script))
    shown = tokenizer.decode(script.given[-1]).partition(prompt.data["messages"][-1]["content"])[2]
    assert script.given[0] == prompt.token_ids
    assert "42" in shown and (wanted == "llama" or shown.index("42") < shown.index("ZeroDivisionError"))
    facts = chat.rollout(prompt).facts
    calls = 1 if wanted == "llama" else 2
    assert (facts.turns, facts.calls, facts.errors, facts.ending) == (2, calls, calls - 1, "done")
    assert chat.messages[-1] == {"role": "assistant", "content": "It is 42."}


class Remote:
    """An asynchronous tool that takes any argument."""

    schema = {"type": "function", "function": {"name": "remote", "description": "", "parameters": {}}}  # noqa: RUF012

    async def __call__(self, **arguments):
        return arguments


class Silent:
    """A client of a server whose tool returns an empty text and a picture."""

    async def ready(self):
        return self

    async def call_tool(self, tool, arguments):
        blocks = [types.SimpleNamespace(type="text", text=""), types.SimpleNamespace(type="image", data="…")]
        return types.SimpleNamespace(content=blocks, is_error=False)


def test_an_empty_result_of_a_server_is_shown_as_an_empty_text(monkeypatch):
    connection = Connection("server", {})
    monkeypatch.setattr(connection, "_session", Silent)
    assert asyncio.run(connection.call("look", {})) == "\n[image]"


class Echoing:
    async def call(self, tool: str, arguments: dict) -> str:
        return json.dumps(arguments)


def test_an_argument_with_any_name_never_ends_the_episode():
    async def answer(tool, name: str):
        return (await Toolbox([tool]).answer([Call(name, {"self": 1, "name": 2, "timeout": 3})], 60.0))[0]

    result = asyncio.run(answer(McpTool(Echoing(), "mcp", "", {}), "mcp"))
    assert not result.failed and json.loads(result.text) == {"self": 1, "name": 2, "timeout": 3}
    result = asyncio.run(answer(Remote(), "remote"))
    assert result.failed and "self" in result.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2_5", r'<tool_call>{"name": "echo", "arguments": {"text": "a\ud83d"}}</tool_call>'),
        ("qwen2_5", r'<tool_call>{"name": "echo", "arguments": {"text": "fail\udc00"}}</tool_call>'),
        ("qwen2_5", r'<tool_call>{"name": "ec\ud83dho", "arguments": {}}</tool_call>'),
        ("llama3_1", r'{"name": "echo", "parameters": {"text": "a\ud83d"}}'),
        ("mistral_nemo", r'[TOOL_CALLS][{"name": "echo", "arguments": {"text": "a\ud83d", "\ud83d": 1}}]'),
        ("mistral_nemo", r'[TOOL_CALLS][{"name": "echo", "arguments": {"text": "a", "b": "\ud83d"}, "id": "\ud83d"}]'),
        ("smollm2", r'<tool_call>{"name": "echo", "arguments": {"text": "a\ud83d"}}</tool_call>'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_does_not_end_the_episode(name, said):
    def echo(text: str) -> str:
        """Return the text, and half a pair.

        Args:
            text: The text.
        """
        if text.startswith("fail"):
            raise ValueError("no \udc00")
        return text + "\ud83d"

    tokenizer = small_tokenizer(TEMPLATES[name])
    agent = Agent(codec_of(tokenizer, TEMPLATES[name]), [echo], Limits(turns=5))
    prompt = agent.prompt("p", "Hi")
    chat = asyncio.run(agent.talk(prompt, Scripted(tokenizer, said, "Done.")))
    assert chat.messages[-1]["content"] == "Done."
    json.dumps(chat.messages, ensure_ascii=False).encode()


def test_a_whole_surrogate_pair_in_a_call_is_one_character():
    (call,) = hermes(r'<tool_call>{"name": "echo", "arguments": {"text": "\ud83d\ude42 \ud83d"}}</tool_call>')
    assert call.arguments == {"text": "🙂 ?"}


def test_every_way_to_fail_is_one_line_for_the_model():
    def raises(a: int):
        """Fail."""
        raise KeyError("no\nsuch key")

    def hangs():
        """Never return."""
        time.sleep(60)

    async def hangs_too():
        """Return late, whoever cancels it."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)

    def huge():
        """Return a megabyte."""
        return "x" * 1_000_000

    async def leaves():
        """Leave."""
        raise SystemExit(3)

    box = Toolbox([raises, hangs, huge, leaves], timeout=1.0, longest=100)
    calls = [
        Call("raises", {"a": 1}), Call("hangs", {}), Call("huge", {}), Call("nobody", {}),
        Call("raises", {}), Call("raises", {"a": 1, "b": 2}),
    ]  # fmt: skip
    began = time.monotonic()
    results = asyncio.run(box.answer(calls, 60.0))
    assert time.monotonic() - began < 10
    assert [result.text for result in results] == [
        "error: KeyError: 'no\\nsuch key'", "error: hangs took longer than 1 s",
        "x" * 100 + "… (999900 more characters)",
        "error: there is no tool named 'nobody'; the tools are raises, hangs, huge, leaves",
        "error: raises: missing a required argument: 'a'", "error: raises: got an unexpected keyword argument 'b'",
    ]  # fmt: skip
    assert [result.failed for result in results] == [True, True, False, True, True, True]

    async def abandoned() -> float:
        began = time.monotonic()
        (result,) = await Toolbox([hangs_too], timeout=0.1).answer([Call("hangs_too", {})], 60.0)
        assert result.text == "error: hangs_too took longer than 0.1 s"
        return time.monotonic() - began

    assert asyncio.run(abandoned()) < 4


@pytest.mark.parametrize("asynchronous", [True, False])
def test_slow_tools_run_at_the_same_time_and_do_not_block(asynchronous):
    """Each of 256 calls waits until all have begun."""
    tool = waiting_tool(256, asynchronous)
    calls = [Call(tool.__name__, {"n": n}) for n in range(256)]
    results = asyncio.run(Toolbox([tool]).answer(calls, 60.0))
    assert [result.text for result in results] == [str(n) for n in range(256)]


def test_calculator():
    wanted = {"2+2*3": "8", "-(4-9)**2": "-25", "7//2 + 7%2": "4", "0.1+0.2": "0.3", "2^0.5": "1.4142135623731"}
    for expression, value in wanted.items():
        assert calculator(expression)[:14] == value[:14]
    for bad in ("9**9**9", "__import__('os')", "1+", "a", "10**5000", "(1).__class__", "1 if 1 else 2", "'a'*9"):
        with pytest.raises(ValueError):
            calculator(bad)
    with pytest.raises(ZeroDivisionError):
        calculator("1/0")


def test_calculator_refuses_long_fractions_before_it_computes_them():
    assert calculator("1.004166667 ** 360")[:8] == "4.467744"  # (1 + 0.05 / 12) ** 360 = 4.46774431…
    assert calculator("2 ** 1000 / 2 ** 990") == "1024" and calculator("0.5 ** -3") == "8"
    for power in ("(0.9**1000)**1000", "(1/3 ** 900) ** -900", "(1 - 0.1**500) ** 900"):
        with pytest.raises(ValueError, match="the power is too large"):
            calculator(power)
    with pytest.raises(ValueError, match="the numbers are too long"):
        calculator("*".join(["0.7**1000"] * 40))


def test_python_runs_in_the_sandbox(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("password")

    async def ask(*codes: str) -> list[str]:
        results = await Toolbox([python]).answer([Call("python", {"code": code}) for code in codes], 60.0)
        return [result.text for result in results]

    found = asyncio.run(ask(
        "print(6 * 7)", "x = 3\nx ** 2", "1 / 0", "import socket; socket.socket()",
        f"open({str(tmp_path / 'new.txt')!r}, 'w').write('x')", "while True: pass", "import os; os._exit(0)",
        "print('x' * 10**6)", "import sys; sys.stderr.write('note')", "syntax error", "print(1); input()",
        "import sys; repr(sys.stdin.read())", "print(1); exit()", "import sys; sys.exit(0)",
        "import sys; sys.exit('bad')",
    ))  # fmt: skip
    assert found[:3] == ["42\n", "9\n", "error: ZeroDivisionError: division by zero\n"]
    assert found[3].startswith("error: PermissionError") and found[4].startswith("error: PermissionError")
    assert not (tmp_path / "new.txt").exists()
    assert all("the code did not finish" in text for text in found[5:7])
    assert len(found[7]) < 5000 and "more characters" in found[7]
    assert found[8].startswith("note") and "SyntaxError" in found[9]
    assert found[10].startswith("1\nerror: EOFError") and found[11] == "''\n"
    assert found[12:] == ["1\n", "", "error: SystemExit: bad\n"]


def test_search_in_a_folder(tmp_path):
    (tmp_path / "a.md").write_text("Solera trains models.\n\nThe capital of France is Paris.\n\nA capital letter.")
    (tmp_path / "b.txt").write_text("Bordeaux is in France. Wine, wine, wine.")
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "c.bin").write_text("France France France")
    search = folder_search(tmp_path, passages=2)
    assert schema_of(search)["function"]["name"] == "search"
    assert search("capital of France").splitlines()[0] == "a.md: The capital of France is Paris."
    assert search("WINE") == "b.txt: Bordeaux is in France. Wine, wine, wine."
    assert search("zebra") == "nothing found"
    with pytest.raises(SoleraError, match="the folder has no text to search"):
        folder_search(tmp_path / "empty")

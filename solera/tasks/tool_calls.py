"""Find tool calls in what a model wrote, and put their results into messages, as each family of models expects it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from solera.errors import SoleraError, one_line
from solera.protocols import Codec
from solera.values import whole_characters

Message = dict[str, Any]


class Call(NamedTuple):
    """A tool call. `mistake` says why it cannot be made; `id` is the model's own, if it wrote one."""

    name: str
    arguments: dict[str, Any]
    mistake: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class CallFormat:
    """How models write calls, and how a chat template is told of them.

    With `structured`, the template needs the parsed calls in the assistant's message. With `in_text`, the template
    knows no tools: they are described in the system message, and results are user messages.
    """

    name: str
    parse: Callable[[str], list[Call]]
    structured: bool = False
    in_text: bool = False

    def answers(self, calls: list[Call], results: list[str], message: Message) -> list[Message]:
        """The messages that carry the results. `message` is the assistant's, and gets the calls if needed."""
        if self.in_text or (self.structured and any(call.mistake for call in calls)):
            return [{"role": "user", "content": "\n".join(map(response, results))}]
        named = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        if not self.structured:
            return named
        ids = [call.id if call.id and len(call.id) == 9 else f"call{n:05d}" for n, call in enumerate(calls)]
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id_, call in zip(ids, calls, strict=True)
        ]
        return [answer | {"tool_call_id": id_} for answer, id_ in zip(named, ids, strict=True)]


def response(result: str) -> str:
    """The text of a result, for models without messages of the role `tool`."""
    return f"<tool_response>\n{result}\n</tool_response>"


def hermes(text: str) -> list[Call]:
    """Calls as Hermes and Qwen write them; a call that the end of the text cuts off counts, if it is complete JSON.

    >>> hermes('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, mistake=None, id=None)]
    """
    said = text.rpartition("</think>")[2]
    found = re.finditer(r"<tool_call>(.*?)(?:</tool_call>|$)|<think>.*", said, re.DOTALL)
    return [_call(each[1]) for each in found if each[1] is not None]


def llama(text: str) -> list[Call]:
    """Calls as Llama 3 writes them: the whole text is one or more JSON objects.

    >>> llama('<|python_tag|>{"name": "add", "parameters": {"a": 1}}')
    [Call(name='add', arguments={'a': 1}, mistake=None, id=None)]
    >>> llama('The result is {"a": 1}.')
    []
    """
    said = text.strip().removeprefix("<|python_tag|>").strip()
    if not said.startswith("{"):
        return []
    decoder, place, calls = json.JSONDecoder(), 0, list[Call]()
    while place < len(said):
        try:
            value, place = decoder.raw_decode(said, place)
        except (ValueError, RecursionError):
            return [*calls, _call(said[place:])] if '"name"' in said else []
        if not isinstance(value, dict) or "name" not in value:
            return []
        calls.append(_of(value))
        place += len(said[place:]) - len(said[place:].lstrip("; \n\t"))
    return calls


def mistral(text: str) -> list[Call]:
    """Calls as Mistral writes them: a list, or since 2025 a name with its arguments.

    >>> mistral('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]') == mistral('[TOOL_CALLS]add[ARGS]{"a": 1}')
    True
    """
    _, marker, said = text.partition("[TOOL_CALLS]")
    if not marker:
        return []
    if not said.lstrip().startswith("["):
        return [_named(part) for part in said.split("[TOOL_CALLS]")]
    try:
        values, _ = json.JSONDecoder().raw_decode(said.lstrip())
    except (ValueError, RecursionError) as error:
        return [Call("", {}, f"the list of calls is not valid JSON: {one_line(error)}")]
    return [_of(value) for value in values]


def _named(part: str) -> Call:
    name, _, arguments = part.partition("[ARGS]")
    name, _, id_ = name.partition("[CALL_ID]")
    try:
        return _of({"name": name.strip(), "arguments": json.loads(arguments or "{}"), "id": id_.strip() or None})
    except (ValueError, RecursionError) as error:
        return Call(name.strip(), {}, f"its arguments are not valid JSON: {one_line(error)}")


def _call(text: str) -> Call:
    try:
        return _of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not valid JSON: {one_line(error)}")


def _of(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, 'a call is an object with a "name" and "arguments"')
    try:
        value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))  # it may hold half a surrogate pair
    except RecursionError:
        return Call("", {}, "the call is nested too deeply")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(value["name"], {}, "its arguments must be an object")
    id_ = value.get("id")
    return Call(value["name"], arguments, None, id_ if isinstance(id_, str) else None)


FORMATS = {
    "hermes": CallFormat("hermes", hermes),
    "llama": CallFormat("llama", llama),
    "mistral": CallFormat("mistral", mistral, structured=True),
    "text": CallFormat("text", hermes, in_text=True),
}
"""By name. `text` is for chat templates without tools."""
_PROBE = {"type": "function", "function": {"name": "tool_of_solera", "description": "", "parameters": {}}}


def format_of(codec: Codec, name: str | None = None, **template_kwargs: Any) -> CallFormat:
    """The format with this name, or the one that the chat template asks for."""
    if name is not None:
        if name not in FORMATS:
            raise SoleraError(f"the format of tool calls is {name!r}; it must be one of {', '.join(FORMATS)}")
        return FORMATS[name]
    try:
        shown = codec.chat_text([{"role": "user", "content": "?"}], [_PROBE], **template_kwargs)
    except SoleraError as error:
        raise SoleraError(f"an agent's prompt {error}") from error
    if "tool_of_solera" not in shown:
        return FORMATS["text"]
    if "[AVAILABLE_TOOLS]" in shown:
        return FORMATS["mistral"]
    return FORMATS["llama" if '"parameters": dictionary' in shown and "<tool_call>" not in shown else "hermes"]


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages, with the tools described in the system message, for a chat template that cannot describe them."""
    first, about = messages[0], described(tools)
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{about}"}, *messages[1:]]
    return [{"role": "system", "content": about}, *messages]


def described(tools: list[dict[str, Any]]) -> str:
    """The system message that tells a model of its tools, if its chat template cannot."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nFor each call, write a JSON object with the "
        'function\'s name and arguments between tags:\n<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>'
    )

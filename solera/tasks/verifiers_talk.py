"""A conversation from requests of the OpenAI protocol, with the exact tokens that the policy wrote.

Each request holds the conversation so far. The policy's own messages in it are replaced by what the policy wrote, so a
`Conversation` can go on after its tokens. If the sender has changed one, a new sequence begins.
"""

import asyncio
import json
import re
from typing import Any

from solera.errors import SoleraError
from solera.protocols import Codec, Generate
from solera.tasks.conversation import Conversation, Message, Turn
from solera.tasks.tool_calls import CallFormat, response, with_tools
from solera.values import whole_characters

_CALLS = re.compile(r"<tool_call>|\[TOOL_CALLS\]")


class Talk:
    """The conversation of an episode, from the requests that the environment makes."""

    def __init__(self, codec: Codec, calls: CallFormat, generate: Generate) -> None:
        self.codec = codec
        self.format = calls
        self.generate = generate
        self.chat: Conversation | None = None
        self._written = dict[tuple[int, str], Message]()
        self._one = asyncio.Lock()

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completion for a request of the OpenAI protocol."""
        async with self._one:
            chat = self._conversation(body)
            most = body.get("max_completion_tokens") or body.get("max_tokens")
            said = await chat.say(max_tokens=most, stop=body.get("stop") or (), temperature=body.get("temperature"))
            if said is None:
                return _given({"role": "assistant", "content": ""}, "length", 0)
            return self._heard(said, chat)

    def _conversation(self, body: dict[str, Any]) -> Conversation:
        tools = body.get("tools") or None
        messages = self._own([plain(message) for message in body["messages"]])
        if tools and self.format.in_text:
            messages, tools = _in_text(messages, tools), None
        if self.chat is None:
            self.chat = Conversation(self.codec, self.generate, messages, tools)
        self.chat.messages, self.chat.tools, self.chat.ended = messages, tools, None
        return self.chat

    def _own(self, messages: list[Message]) -> list[Message]:
        """The messages, with those of the policy as it wrote them."""
        own, place = list[Message](), 0
        for message in messages:
            is_own = message["role"] == "assistant"
            own.append(self._written.get((place, _mark(message)), message) if is_own else message)
            place += is_own
        return own

    def _heard(self, said: Turn, chat: Conversation) -> dict[str, Any]:
        """What the policy wrote, as a message of the protocol. A call that cannot be read is text."""
        messages, own, calls = chat.messages, chat.messages[-1], self.format.parse(said.text)
        shown: Message = {"role": "assistant", "content": said.text}
        place = sum(message["role"] == "assistant" for message in messages) - 1
        if calls and not any(call.mistake for call in calls) and not said.cut_off:
            self.format.answers(calls, [""] * len(calls), own)
            chat.calls += len(calls)
            shown["content"] = "" if self.format.name == "llama" else _CALLS.split(said.text)[0].strip()
            ids = [each["id"] for each in own.get("tool_calls", ())] or [
                f"c{place:03d}x{n:04d}" for n in range(len(calls))
            ]
            shown["tool_calls"] = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for id_, call in zip(ids, calls, strict=True)
            ]
        self._written[place, _mark(shown)] = own
        why = "length" if said.cut_off else "tool_calls" if "tool_calls" in shown else "stop"
        return _given(shown, why, len(said.completion.token_ids_T))


def _given(message: Message, why: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    return {"message": message, "finish_reason": why, "usage": usage}


def _mark(message: Message) -> str:
    """What tells whether a message of the policy came back unchanged."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content") or "", calls])


def plain(message: Message) -> Message:
    """A message whose content is text. Chat templates expect the arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise SoleraError("the environment shows the policy something other than text, such as an image")
        content = "".join(part["text"] for part in content)
    return {**message, "content": whole_characters(content or "")}


def _in_text(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages for a chat template without tools."""
    shown = list[Message]()
    for message in with_tools(messages, tools):
        if message["role"] != "tool":
            shown.append(message)
            continue
        text = response(message["content"])
        if shown[-1]["role"] == "user" and shown[-1].get("results"):
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{text}"}
        else:
            shown.append({"role": "user", "content": text, "results": True})
    return shown

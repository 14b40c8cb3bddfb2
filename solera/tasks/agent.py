"""A chat model with tools: it writes, its calls are made and answered, until it answers without a call."""

from collections.abc import Sequence
from typing import Any

from solera.errors import SoleraError
from solera.protocols import Codec, Generate
from solera.records import Prompt
from solera.tasks.conversation import Conversation, Limits, Message
from solera.tasks.tool_calls import format_of, with_tools
from solera.tasks.tools import LONGEST, TIMEOUT, Tool, Toolbox


class Agent:
    """Makes prompts that describe the tools, and runs conversations that use them.

    `tools` are functions with type hints and a docstring. `timeout` is in seconds per call; `longest` is the number of
    characters of a result that the model sees. `call_format` is how the model writes calls (hermes, llama, mistral,
    text); by default, the chat template tells. `template_kwargs` are arguments of the chat template.
    """

    def __init__(
        self,
        codec: Codec,
        tools: Sequence[Tool] = (),
        limits: Limits | None = None,
        *,
        timeout: float = TIMEOUT,
        longest: int = LONGEST,
        call_format: str | None = None,
        **template_kwargs: Any,
    ) -> None:
        self.codec = codec
        self.limits = limits
        self.template_kwargs = template_kwargs
        self.tools = Toolbox(tools, timeout, longest)
        self.format = format_of(codec, call_format, **template_kwargs)
        self.schemas = None if self.format.in_text or not tools else self.tools.schemas

    def prompt(self, key: str, messages: str | Sequence[Message], **data: Any) -> Prompt:
        """A prompt for `talk`. `messages` may be the text of a single user message."""
        shown = self.messages(messages)
        try:
            ids = self.codec.chat(shown, self.schemas, **self.template_kwargs)
        except SoleraError as error:
            raise SoleraError(f"prompt {key!r} {error}") from error
        return Prompt(key, ids, {**data, "messages": shown})

    def messages(self, messages: str | Sequence[Message]) -> list[Message]:
        """The first messages of a conversation, with the tools described in the system message where the chat template
        cannot describe them."""
        shown = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return with_tools(shown, self.tools.schemas) if self.format.in_text and self.tools.schemas else shown

    def start(self, prompt: Prompt, generate: Generate) -> Conversation:
        """The conversation of a prompt made by `prompt`, before its first turn."""
        return Conversation(
            self.codec, generate, prompt.data["messages"], self.schemas, self.limits, **self.template_kwargs
        )

    async def talk(self, prompt: Prompt, generate: Generate, **turn: Any) -> Conversation:
        """Run a conversation until the policy answers without a call, or a limit ends it. `turn` are the arguments of
        every turn."""
        chat = self.start(prompt, generate)
        while await self.step(chat, **turn):
            pass
        return chat

    async def step(self, chat: Conversation, toolbox: Toolbox | None = None, **turn: Any) -> bool:
        """Let the policy write a turn, and answer its calls. Returns whether there were any, so that it goes on.

        A turn that was cut off by the length limit ends the conversation.
        """
        said = await chat.say(**turn)
        if said is None:
            return False
        if said.cut_off:
            chat.ended = "length"
            return False
        calls = self.format.parse(said.text)
        if not calls:
            return False
        results = await (toolbox or self.tools).answer(calls, chat.seconds_left)
        chat.count_calls(results)
        chat.add(*self.format.answers(calls, [result.text for result in results], chat.messages[-1]))
        return True

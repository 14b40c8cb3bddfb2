"""An episode as chat messages, with the exact tokens that the model saw and wrote.

The policy's own tokens are never tokenised again. Before each turn the chat template renders the whole conversation. If
the result begins with the text so far, the rest is the text in between (tool results, user messages, the next header),
and only this rest is tokenised. If it does not, the template has rewritten the history; many templates strip earlier
reasoning. The next turn then starts another sequence of the same rollout, with the rendered text as its prompt.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from solera.errors import SoleraError
from solera.protocols import Codec, Generate
from solera.records import Author, Completion, EpisodeFacts, Prompt, Reward, Rollout, Segment, Turns
from solera.tasks.tools import Result
from solera.values import kind

Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else the chat template reads."""
DONE = "done"
"""How an episode ended that no limit ended."""


@dataclass(frozen=True)
class Limits:
    """When a conversation ends. `None` means no limit."""

    turns: int | None = None
    """Most turns of the policy."""
    tokens: int | None = None
    """Most tokens of the conversation, given and written."""
    seconds: float | None = None
    """No turn begins and no tool runs after this many seconds."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise SoleraError(f"Limits: {name} is {value}; it must be above 0, or None for no limit")


class Turn(NamedTuple):
    """A turn of the policy: its text without the end token, and the completion."""

    text: str
    completion: Completion

    @property
    def cut_off(self) -> bool:
        """Whether the length limit ended it."""
        return self.completion.finish_reason == "length"


class Conversation:
    """A chat between the policy and everyone else: users, tools, an environment.

    `say` lets the policy write a turn, `add` adds messages of others, `rollout` returns the episode for training.
    `tools` are JSON schemas for the chat template; `template_kwargs` are its other arguments.
    """

    def __init__(
        self,
        codec: Codec,
        generate: Generate,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        limits: Limits | None = None,
        **template_kwargs: Any,
    ) -> None:
        self.codec = codec
        self.messages = [_checked(message) for message in messages]
        self.ended: str | None = None
        """The limit that ended the conversation: turns, tokens, seconds, or context if the model's context is full."""
        self.calls = self.errors = self.turns = self.retokenised = 0
        self.tool_seconds = 0.0
        self._generate = generate
        self.tools = tools
        self._template_kwargs = template_kwargs
        self._limits = limits or Limits()
        self._began = time.monotonic()
        self._earlier: list[tuple[Turns, tuple[Segment, ...]]] = []
        self._parts: list[tuple[int, ...] | Completion] = []
        self._segments: list[Segment] = []
        self._answered = self._failed = 0
        self._ids: tuple[int, ...] = ()
        self._text = ""
        self._written = 0

    def add(self, *messages: Message) -> None:
        """Add messages that the policy did not write."""
        self.messages += [_checked(message) for message in messages]

    def count_calls(self, results: Sequence[Result]) -> None:
        """Count tool calls for the metrics."""
        failed = sum(result.failed for result in results)
        self.calls += len(results)
        self.errors += failed
        self._answered += len(results)
        self._failed += failed
        self.tool_seconds += math.fsum(result.seconds for result in results)

    async def say(
        self, *, max_tokens: int | None = None, stop: str | Sequence[str] = (), temperature: float | None = None
    ) -> Turn | None:
        """Let the policy write the next message. Returns `None` if a limit has ended the conversation.

        The arguments are those of `generate`. A turn at temperature 0 is not trained on.
        """
        if self._limits.turns is not None and self.turns >= self._limits.turns:
            self.ended = "turns"
        elif self.seconds_left <= 0:
            self.ended = "seconds"
        if self.ended:
            return None
        self._give()
        room = None if self._limits.tokens is None else self._limits.tokens - len(self._ids)
        if room is not None and room <= 0:
            self.ended = "tokens"
            return None
        settings = {} if room is None else {"room": room}
        completion = await self._generate(
            self._ids, max_tokens=max_tokens, stop=stop, temperature=temperature, **settings
        )
        return self._hear(completion)

    def reward(self, value: float, part: str = "reward") -> Reward:
        """A reward for the last turn that is trained on. Pass it to `rollout`."""
        for number, (parts, _) in reversed(list(enumerate(self._sequences()))):
            tokens = sum(len(each.token_ids_T) for each in parts if isinstance(each, Completion) and each.trained)
            if tokens:
                return Reward(value, part, position=tokens - 1, sequence=number)
        raise SoleraError("reward: no turn so far is trained on; use Reward(value) to reward the whole episode")

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        most = self._limits.seconds
        return math.inf if most is None else self._began + most - time.monotonic()

    def rollout(self, prompt: Prompt, *rewards: Reward, ending: str | None = None) -> Rollout:
        """The episode, with its rewards. `ending` says in the metrics how it ended; by default the limit that ended it,
        or `done`."""
        facts = EpisodeFacts(
            self.turns, ending or self.ended or DONE, self.calls, self.errors, self.tool_seconds, self.retokenised
        )
        written = self._sequences()
        return Rollout.of_sequences(
            prompt,
            *[parts for parts, _ in written],
            rewards=rewards,
            facts=facts,
            segments=tuple(segments for _, segments in written),
        )

    def _sequences(self) -> list[tuple[Turns, tuple[Segment, ...]]]:
        """The sequences of the rollout: those with a turn. If the engine has failed, one may have none."""
        begun = (*self._earlier, (tuple(self._parts), tuple(self._segments)))
        return [(parts, segments) for parts, segments in begun if any(isinstance(part, Completion) for part in parts)]

    def _give(self) -> None:
        """Make the conversation so far the next input of the engine."""
        try:
            rendered = self.codec.chat_text(self.messages, self.tools, **self._template_kwargs)
        except SoleraError as error:
            raise SoleraError(f"the conversation {error}") from error
        between = self._between(rendered)
        if between is None:
            if self._parts:
                self._earlier.append((tuple(self._parts), tuple(self._segments)))
                self.retokenised += self._written
            self._ids = self.codec.encode_after((), rendered)
            self._parts = [self._ids]
            self._segments = [Segment("prompt", len(self._ids), self._answered, self._failed)]
        else:
            self._ids += between
            self._parts.append(between)
            author: Author = "tool" if self._answered or self.messages[-1]["role"] == "tool" else "environment"
            self._segments.append(Segment(author, len(between), self._answered, self._failed))
        self._answered = self._failed = 0
        self._text = rendered

    def _between(self, rendered: str) -> tuple[int, ...] | None:
        """The tokens that the template adds; `None` if its text does not continue what the model saw and wrote."""
        if not self._parts or not rendered.startswith(self._text):
            return None
        added = rendered[len(self._text) :]
        ids = self.codec.encode_after(self._ids, added)
        return ids if self.codec.text_after(self._ids, ids) == added else None

    def _hear(self, completion: Completion) -> Turn | None:
        """Add what the policy wrote."""
        written = tuple(completion.token_ids_T.tolist())
        self._parts.append(completion)
        self._segments.append(Segment("policy" if completion.trained else "greedy", len(written)))
        if not written:
            self.ended = "context"
            return None
        body = written[:-1] if written[-1] in self.codec.end_token_ids else written
        text = self.codec.text_after(self._ids, body)
        self._text += self.codec.text_after(self._ids, written)
        self._ids += written
        self._written += len(written)
        self.turns += 1
        self.messages.append({"role": "assistant", "content": text})
        return Turn(text, completion)


def _checked(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise SoleraError(
            f'a chat message must be a dictionary with a role, such as {{"role": "user", …}}, not {kind(message)}'
        )
    return message

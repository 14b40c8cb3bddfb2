"""Compute rewards: add up graders and the user's own functions, and apply penalties for length."""

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from solera.config import GYM, LARGEST_REWARD, Config, RewardConfig, TaskConfig, kind_of_task, perhaps, task_parts
from solera.errors import SoleraError, StopRunError, one_line
from solera.protocols import Codec
from solera.records import REWARD_RULE, Completion, Prompt, Reward, Rollout
from solera.tasks.batching import Batcher
from solera.tasks.calls import Call, Outcome, TookTooLongError, call_each
from solera.tasks.company import together
from solera.tasks.crowd import Crowd, crowd_of
from solera.tasks.functions import OwnFunction, check_spec, given, load, load_module, part_name, where
from solera.tasks.graders import COMPARING, GRADERS, Grader, is_grader
from solera.tasks.gym import check_gym, gym
from solera.tasks.jsonl import columns_of, read_split
from solera.tasks.mathematics import math as math_grader
from solera.tasks.own import check_task, load_task
from solera.tasks.single_turn import GENERATED_COLUMNS, Problems

OWN_GRADER = {
    "arithmetic": "verbatim", "jsonl": "exact", "gsm8k": "number", "math": "math", "countdown": "countdown",
    "gym": "gym",
}  # fmt: skip
"""The default grader of each task, if `reward.functions` is empty."""
OVERLONG, TRUNCATED = "overlong", "truncated"
TAKEN = (OVERLONG, TRUNCATED, "mean", "zero_variance_fraction")
"""Names that parts or metrics below `reward/` already use."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Attempt(Rollout):
    """A rollout as a reward function sees it: without rewards, and with its text."""

    text: str = ""

    @classmethod
    def of_rollout(cls, rollout: Rollout, text: str) -> "Attempt":
        return cls(**{**vars(rollout), "text": text})


class Check(NamedTuple):
    """A grader with the two rewards it can give. A slow grader may have a `crowd`, which grades many at once."""

    grader: Grader
    right: Reward
    wrong: Reward
    crowd: Crowd | None

    async def reward(self, text: str, answer: str, finished: bool) -> Reward:
        asked = text, answer, finished
        return self.right if (await self.crowd.grade(asked) if self.crowd else self.grader(*asked)) else self.wrong


class Judgement(NamedTuple):
    """A grader in another process, the column it compares with, and its part of the reward."""

    score: Callable[[str, Any, bool], Awaitable[float]]
    column: str
    weight: float
    part: str
    source: str

    async def reward(self, text: str, row: Mapping[str, Any], finished: bool) -> Reward:
        return Reward(self.weight * await self.score(text, row[self.column], finished), self.part, self.source)


@dataclass(frozen=True)
class Rewards:
    """The Grade of a run. Graders are called at once, the user's functions in batches. Length penalties come last."""

    codec: Codec
    answer: str
    checks: tuple[Check, ...]
    judged: tuple[Judgement, ...] = ()
    batchers: "tuple[RewardBatcher, ...]" = ()
    truncated: Reward | None = None
    overlong: Callable[[int], float] | None = None
    comparing: str = ""
    """Names of the graders that need the answer column."""

    async def __call__(self, prompt: Prompt, completion: Completion) -> tuple[Reward, ...]:
        attempt = partial(Rollout.of, prompt, completion)
        return await self._grade(prompt, completion.token_ids_T, completion.finish_reason, attempt)

    async def of_rollout(self, prompt: Prompt, rollout: Rollout) -> tuple[Reward, ...]:
        """The rewards given by the task, and those of the last turn."""
        return await self._grade(prompt, last_turn(rollout), rollout.finish_reason, lambda: rollout, rollout.rewards)

    async def _grade(
        self,
        prompt: Prompt,
        token_ids_T: npt.NDArray[np.int32],
        finish_reason: str,
        rollout: Callable[[], Rollout],
        given: tuple[Reward, ...] = (),
    ) -> tuple[Reward, ...]:
        finished = finish_reason == "stop"
        if self.truncated is not None and not finished:
            return (self.truncated,)
        if self.comparing and self.answer not in prompt.data:
            raise SoleraError(
                f"prompt {prompt.key!r}: field {self.answer!r} is missing, but the grader {self.comparing} needs it: "
                "put it into the prompt's data"
            )
        text = self.codec.decode(token_ids_T)
        rewards = list(given)
        for check in self.checks:
            rewards.append(await check.reward(text, str(prompt.data.get(self.answer, "")), finished))
        for judgement in self.judged:
            rewards.append(await judgement.reward(text, prompt.data, finished))
        if self.batchers:
            attempt = Attempt.of_rollout(rollout(), text)
            asked = [await function.ask(attempt, prompt) for function in self.batchers]
            rewards += [reward for reward in asked if reward is not None]
        if self.overlong is not None and rewards:
            rewards.append(Reward(self.overlong(len(token_ids_T)), OVERLONG, "length"))
        return tuple(rewards)

    def take_metrics(self) -> dict[str, float]:
        """What reward models did since the last call, all added up (`judge/…`, `classifier/…`)."""
        total = Counter[str]()
        for batcher in self.batchers:
            total.update(getattr(batcher.function.call, "take_metrics", dict)())
        return dict(total)


def last_turn(rollout: Rollout) -> npt.NDArray[np.int32]:
    """The tokens that the policy wrote last, without interruption; a greedy turn counts."""
    written = (sequence.last_turn for sequence in reversed(rollout.sequences))
    return next((tokens_T for tokens_T in written if len(tokens_T)), np.zeros(0, np.int32))


def build_rewards(
    config: Config,
    codec: Codec,
    problems: Problems,
    further: Sequence[Callable[..., Any]] = (),
    own_task: bool = False,
) -> Rewards:
    """Build the rewards of a resolved config, plus `further` functions with weight 1. If none is named, the task's
    default grader is used; the user's own task (`own_task`) has none."""
    check_functions(config.reward)
    reward, limit = config.reward, config.sampling.max_tokens
    weights = dict(zip(reward.functions, reward.weights or [1.0] * len(reward.functions), strict=True))
    column, answer = config.task.prompt or "prompt", config.task.answer or "answer"
    own = own_functions(config, problems.columns)
    own += [given(function, problems.columns - {column}) for function in further]
    check_names([*filter(is_grader, weights), *(function.spec for function in own)])
    if not weights and not further and not own_task:
        parts = [(own_grader(config.task), 1.0, Reward.part, Reward.source)]
    else:
        parts = [(spec, weight, spec, spec) for spec, weight in weights.items() if is_grader(spec)]
    return Rewards(
        codec,
        answer,
        tuple(
            Check(GRADERS[name], Reward(weight, part, source), Reward(0.0, part, source), crowd_of(name))
            for name, weight, part, source in parts
            if name in GRADERS
        ),
        tuple(
            Judgement(gym if name == "gym" else math_grader, "gym" if name == "gym" else answer, weight, part, source)
            for name, weight, part, source in parts
            if name not in GRADERS
        ),
        tuple(RewardBatcher(function, weights.get(function.spec, 1.0), reward, problems, column) for function in own),
        Reward(reward.truncated_reward, TRUNCATED, "length") if reward.truncated == "penalise" else None,
        partial(overlong, limit, reward.overlong_buffer, reward.overlong_penalty) if reward.overlong_buffer else None,
        ", ".join(name for name, *_ in parts if name in COMPARING),
    )


def own_grader(task: TaskConfig) -> str:
    """The default grader of a task, if `reward.functions` is empty."""
    return OWN_GRADER[kind_of_task(task.name)]


def graders(config: Config) -> frozenset[str]:
    """The graders in use that compare with the answer column."""
    return frozenset(config.reward.functions or (own_grader(config.task),)) & COMPARING


def own_functions(config: Config, columns: Set[str]) -> list[OwnFunction]:
    """The user's functions named in the config, for a task whose rows have these columns."""
    specs = [spec for spec in config.reward.functions if not is_grader(spec)]
    return load(specs, columns, config.task.prompt or "prompt")


def check_data(config: Config) -> dict[str, Set[str]]:
    """Check a resolved config's rewards and data as far as possible without a tokenizer; return the columns of each
    task."""
    check_functions(config.reward)
    columns = dict[str, Set[str]]()
    for name, task in task_parts(config.task).items():
        kind, columns[name] = kind_of_task(task.name), GENERATED_COLUMNS
        if "gym" in config.reward.functions and kind != "gym":
            raise SoleraError(f"reward.functions: gym is the grader of tasks gym:NAME, not of {task.name}")
        if kind == "own":
            check_task(task.name)
        elif kind == "gym":
            check_gym(task.name.removeprefix(GYM), task.level)
        elif task.prompt is not None:
            training, held_out = read_split(task, graders(replace(config, task=task)))
            columns[name] = columns_of(training + held_out)
    return columns


def check_own(config: Config, columns: Mapping[str, Set[str]]) -> None:
    """Check the user's functions, which executes their files; `columns` are those of each task."""
    for name, task in task_parts(config.task).items():
        if kind_of_task(task.name) == "own":  # its columns are known once it has the model's codec
            load_task(task.name, task.path)
            for spec in config.reward.functions:
                if not is_grader(spec):
                    load_module(spec, "reward.functions")
        else:
            own_functions(replace(config, task=task), columns[name])


def check_functions(reward: RewardConfig) -> None:
    """Check the functions as far as possible before they are imported."""
    for spec in reward.functions:
        check_spec(spec)
    check_names(list(reward.functions))


def check_names(specs: list[str]) -> None:
    """Each function is a part of the reward and a metric, under a unique name."""
    names = [part_name(spec) for spec in specs]
    for spec, name in zip(specs, names, strict=True):
        if name in TAKEN or names.count(name) > 1:
            fault = "already has this name" if name in TAKEN else "is listed twice"
            raise SoleraError(f"reward.functions: {spec}: reward/{name} {fault}: give the function another name")


def overlong(limit: int, buffer: int, penalty: float, length: int) -> float:
    """DAPO's soft overlong punishment: 0 up to limit − buffer tokens, then linear down to −penalty at the limit.

    >>> [overlong(16, 4, 1.0, length) for length in (12, 13, 16)]
    [0.0, -0.25, -1.0]
    """
    return -penalty * (length - limit + buffer) / buffer if length > limit - buffer else 0.0


@dataclass(frozen=True, eq=False)
class Request:
    """A response to grade, and the group that it belongs to."""

    attempt: Attempt
    prompt: Prompt
    group: object


class RewardBatcher:
    """A user's function. All requests made in one turn of the event loop form one batch."""

    def __init__(
        self, function: OwnFunction, weight: float, config: RewardConfig, problems: Problems, prompt_column: str
    ) -> None:
        self.function = function
        self.weight = weight
        self.config = config
        self.problems = problems
        self.prompt_column = prompt_column
        self.ranks: bool = getattr(function.call, "ranks", False)
        """Whether it compares the members of a group. It is then called for each whole group."""
        self._requests = Batcher(self._judge)
        self._warned = False

    async def ask(self, attempt: Attempt, prompt: Prompt) -> Reward | None:
        group = await together() if self.ranks else None
        return await self._requests.ask(Request(attempt, prompt, group))

    async def _judge(self, requests: list[Request]) -> list[Reward | None]:
        rewards = dict[int, Reward | None]()
        shares = self._shares(requests)
        calls = [self._call(share) for share in shares]
        async with aclosing(call_each(self.function.call, calls, self.config.timeout)) as outcomes:
            async for outcome in outcomes:
                share = shares.pop(0)
                several = [outcome] if self.function.takes is None else self._spread(outcome, share)
                rewards |= {id(each): self._reward(one, each) for one, each in zip(several, share, strict=True)}
        return [rewards[id(request)] for request in requests]

    def _shares(self, requests: list[Request]) -> list[list[Request]]:
        """The requests of each call: of one response, of a group, or of the whole batch."""
        if self.function.takes is None:
            return [[request] for request in requests]
        groups = dict[int, list[Request]]()
        for request in requests:
            groups.setdefault(id(request.group), []).append(request)
        return list(groups.values())

    def _call(self, requests: list[Request]) -> Call:
        takes = self.function.takes
        if takes is None:
            return (requests[0].attempt, dict(requests[0].prompt.data)), {}
        prompts = [request.prompt.data[self.prompt_column] for request in requests]
        batch: dict[str, list[Any]] = {
            name: [request.prompt.data.get(name) for request in requests] for name in takes
        } | {
            "prompts": prompts,
            "completions": [_completion(r.attempt.text, p) for r, p in zip(requests, prompts, strict=True)],
            "completion_ids": [_response_ids(request.attempt) for request in requests],
        }
        return (), {name: batch[name] for name in takes}

    def _spread(self, outcome: Outcome, requests: list[Request]) -> list[Outcome]:
        """Split the outcome of one call for the whole batch into one per request."""
        values = outcome.value.tolist() if hasattr(outcome.value, "tolist") else outcome.value
        if outcome.error is None and isinstance(values, list | tuple) and len(values) == len(requests):
            return [Outcome(error=each) if isinstance(each, Exception) else Outcome(each) for each in values]
        gave = f"a list of {len(values)}" if isinstance(values, list | tuple) else shown(values)
        batch = f"a batch of {len(requests)} that starts here"
        complaint = f"returned {gave} for {batch}, but must return a list of {len(requests)}, one for each response"
        if outcome.error:
            complaint = f"{self._complaint(outcome)}, called for {batch}"
        self._fail(requests[0], complaint, outcome.error)
        return [Outcome(None)] * len(requests)

    def _reward(self, outcome: Outcome, request: Request) -> Reward | None:
        if outcome.error is not None:
            return self._fail(request, self._complaint(outcome), outcome.error)
        if outcome.value is None:
            return None
        value = as_number(outcome.value)
        if value is None:
            return self._fail(request, f"returned {shown(outcome.value)}, which is not a number")
        if not abs(value * self.weight) <= LARGEST_REWARD:
            times = f" times reward.weights' {self.weight:g}" if abs(value) <= LARGEST_REWARD else ""
            return self._fail(request, f"returned {shown(outcome.value)}{times}; {REWARD_RULE}")
        return Reward(value * self.weight, self.function.name, self.function.spec)

    def _complaint(self, outcome: Outcome) -> str:
        error = outcome.error
        if isinstance(error, TookTooLongError):
            return f"took longer than reward.timeout = {self.config.timeout:g} s"
        assert error is not None
        source = self.function.spec.rpartition(":")[0]
        said = shown(error)
        if isinstance(error, AttributeError) and isinstance(error.obj, Attempt):
            known = [name for name in dir(error.obj) if not name.startswith("_")]
            said = f"AttributeError: the rollout has no {error.name!r}{perhaps(str(error.name), known)}"
        return f"raised {said}{where(error, source)}"

    def _fail(self, request: Request, complaint: str, cause: BaseException | None = None) -> Reward | None:
        line = f"{self.problems.place(request.prompt)}: reward {self.function.spec} {complaint}"
        if self.config.errors == "stop":
            raise StopRunError(line) from cause
        if not self._warned:
            log.warning("solera: %s: counted as missing, and so are further errors of this function", line)
            self._warned = True
        return None


def _completion(text: str, prompt: Any) -> Any:
    """The completion in TRL's form: text for a text prompt, messages for a prompt of messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _response_ids(attempt: Attempt) -> list[int]:
    return [token_id for sequence in attempt.sequences for token_id in sequence.token_ids_T[sequence.mask_T].tolist()]


def as_number(value: Any) -> float | None:
    """Convert a number, a boolean, or a zero-dimensional array of one of these; `None` for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: Any) -> str:
    """Describe any value in one short line, even if its own `repr` fails."""
    try:
        if isinstance(value, BaseException):
            name = type(value).__name__
            return name if not str(value) else f"{name}: {one_line(value)}"
        return " ".join(repr(value).split())[:80]
    except Exception:
        return f"a {type(value).__name__}"

"""The task, rewards, objective and sync rule that a user passes from Python, checked before the model is loaded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from solera import config as configuration
from solera.config import Config, kind_of_task
from solera.errors import SoleraError
from solera.objectives.objective import Objective
from solera.sync.rules import SyncRule
from solera.tasks.functions import spec_of
from solera.tasks.graders import is_grader
from solera.tasks.own import TaskFactory, check_factory
from solera.values import kind


@dataclass(frozen=True)
class OwnCode:
    """Parts of a run that the user wrote. Parts that are unset come from the config."""

    task: TaskFactory | None = None
    rewards: tuple[Callable[..., Any], ...] = ()
    objective: Objective | None = None
    rule: SyncRule | None = None

    def names(self) -> list[str]:
        return [name for name, part in vars(self).items() if part]

    def has_task(self, config: Config) -> bool:
        """Whether the task is the user's code, given in Python or named in the config."""
        return self.task is not None or kind_of_task(config.task.name) == "own"

    def functions(self, config: Config) -> tuple[str, ...]:
        """The user's own reward functions, passed from Python or named in the config."""
        named = (spec for spec in config.reward.functions if not is_grader(spec))
        return (*named, *map(spec_of, self.rewards))


NO_OWN_CODE = OwnCode()


def own_code(
    config: Config,
    task: TaskFactory | str | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    objective: Objective | str | None = None,
    rule: SyncRule | str | None = None,
) -> tuple[Config, OwnCode]:
    """Put parts given by name into the config. Return it with the parts given as code. Wrong types are refused."""
    if not isinstance(config, Config):
        configuration.check(config)
    if isinstance(task, str):
        config, task = configuration.override(config, "task", name=task), None
    elif task is not None:
        check_factory(task, "task")
    if isinstance(objective, str):
        config, objective = configuration.override(config, "objective", name=objective), None
    if isinstance(rule, str):
        config, rule = configuration.override(config, "sync", rule=rule), None
    _check_objective(objective)
    if rule is not None and not callable(rule):
        raise SoleraError(f"rule must be a name or a function of (state, version, diagnosis), not {kind(rule)}")
    named, functions = _sorted_rewards(rewards)
    return _with_rewards(config, named), OwnCode(task, functions, objective, rule)


def _check_objective(objective: Any) -> None:
    if objective is None or isinstance(objective, Objective):
        return
    hint = ": wrap it in solera.custom_objective(term)" if callable(objective) else ""
    raise SoleraError(f"objective must be a name or the result of solera.custom_objective, not {kind(objective)}{hint}")


def _sorted_rewards(rewards: Any) -> tuple[tuple[str, ...], tuple[Callable[..., Any], ...]]:
    """Separate rewards given by name from those given as functions."""
    if callable(rewards) or isinstance(rewards, str) or not isinstance(rewards, Iterable):
        given = getattr(rewards, "__name__", repr(rewards))
        raise SoleraError(f"rewards must be a list of functions or names, such as rewards=[{given}]")
    given = tuple(rewards)
    for reward in given:
        if not callable(reward) and not isinstance(reward, str):
            raise SoleraError(f"rewards contains {kind(reward)}; each must be a reward function or the name of one")
    return tuple(r for r in given if isinstance(r, str)), tuple(r for r in given if not isinstance(r, str))


def _with_rewards(config: Config, named: tuple[str, ...]) -> Config:
    """Add these reward functions to the config, with weight 1 if the config has weights."""
    new = tuple(name for name in named if name not in config.reward.functions)
    weights = (*config.reward.weights, *[1.0] * len(new)) if config.reward.weights else ()
    reward = replace(config.reward, functions=(*config.reward.functions, *new), weights=weights)
    return replace(config, reward=reward) if new else config

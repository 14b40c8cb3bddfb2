"""Games of TextArena for one player, as environments. Only this module imports the package `textarena`.

The games draw from Python's global random numbers. Each game here keeps a state of its own and swaps it in for every
step, so that an episode can be repeated, whatever other games do meanwhile.
"""

import random
from functools import partial
from typing import Any

from solera.errors import SoleraError, one_line
from solera.protocols import Codec
from solera.tasks.conversation import Limits
from solera.tasks.environments import FIRST_HELD_OUT, SEEDED, EnvironmentTask

TURNS = 100
"""Most turns of an episode. Most games end earlier by their own rules."""


def textarena_task(name: str, codec: Codec) -> EnvironmentTask:
    """The task of the game with this name, such as GuessTheNumber-v0. Each seed is a problem; training has the even
    seeds and evaluation the odd ones."""
    make = partial(Game, name)
    _try(name)
    return EnvironmentTask(codec, make, name=name)


class Game:
    """A game, in Gymnasium's interface. An observation is what the game has said since the last one."""

    limits = Limits(turns=TURNS)

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        number = 2 * (seed - FIRST_HELD_OUT) + 1 if seed >= FIRST_HELD_OUT else 2 * seed
        random.seed(number)  # `EnvironmentTask` puts the global state back
        self._game = _textarena().make(self.name)
        self._game.reset(num_players=1, seed=number)
        self._random = random.getstate()
        self._inner = self._game
        while hasattr(self._inner, "env"):  # wrappers repeat the whole game in every observation
            self._inner = self._inner.env
        return self._said(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with SEEDED:
            before = random.getstate()
            random.setstate(self._random)
            try:
                done, _ = self._game.step(action)
            finally:
                self._random = random.getstate()
                random.setstate(before)
        return self._said(), self._reward() if done else 0.0, done, False, {}

    def _reward(self) -> float:
        """Four games of 0.7.4 mix up the reward and the reason of an invalid move; the reward is then a text."""
        value = (self._inner.state.rewards or {}).get(0, 0.0)
        return 0.0 if isinstance(value, str) else float(value)

    def _said(self) -> str:
        action = _textarena().ObservationType.PLAYER_ACTION
        said = self._inner.get_observation()[1]
        return "\n".join(str(text) for _, text, kind in said if kind is not action).strip()


def _try(name: str) -> None:
    """Refuse a game that does not exist, that cannot be loaded, or that is not for one player."""
    textarena = _textarena()
    from textarena.envs.registration import ENV_REGISTRY

    from solera.config import perhaps

    if name not in ENV_REGISTRY:
        raise SoleraError(f"task textarena:{name}: TextArena has no such game{perhaps(name, sorted(ENV_REGISTRY))}")
    game = Game(name)
    state = random.getstate()
    try:
        game.reset(0)
        alone = isinstance(game._inner.state, textarena.SinglePlayerState)
    except LookupError as error:
        raise SoleraError(f"task textarena:{name}: {_missing(error)}") from error
    except Exception as error:  # a game may refuse one player in any way
        raise SoleraError(f"task textarena:{name}: it cannot be started for one player: {one_line(error)}") from error
    finally:
        random.setstate(state)
    if not alone:
        raise SoleraError(f"task textarena:{name}: it is not a game for one player; others are not supported")


def _missing(error: LookupError) -> str:
    """Many games use word lists that nltk downloads."""
    if "nltk" in str(error):
        return (
            "it needs word lists of nltk that are not here and could not be downloaded: run "
            "`python -m nltk.downloader words averaged_perceptron_tagger_eng` where there is a network"
        )
    return one_line(error)


def _textarena() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise SoleraError(
            f"task textarena: {one_line(error)}: install the extra textarena: pip install 'solera[textarena]'"
        ) from error
    return textarena

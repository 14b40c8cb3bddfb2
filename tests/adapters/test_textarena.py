"""Games of the real package TextArena."""

import asyncio
import random
import re

import pytest

from solera.errors import SoleraError
from solera.tasks.textarena_games import Game, textarena_task
from tests.command import solera as command
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer
from tests.tasks.test_conversation import Scripted

pytestmark = pytest.mark.adapters
QWEN = TEMPLATES["qwen2_5"]


@pytest.fixture(scope="module")
def codec():
    return codec_of(small_tokenizer(QWEN), QWEN)


class Halving:
    """Guesses the number by halving. What it knows, it reads in the conversation."""

    def __init__(self, codec) -> None:
        self.codec, self.seen = codec, ""

    async def __call__(self, token_ids, **settings):
        self.seen = self.codec.tokenizer.decode(token_ids)
        low, high = 1, 20
        for guess, hint in re.findall(r"\[(\d+)\]<\|im_end\|>.*?target number is (\w+)", self.seen, re.DOTALL):
            low, high = (low, int(guess) - 1) if hint == "lower" else (int(guess) + 1, high)
        return await Scripted(self.codec.tokenizer, f"[{(low + high) // 2}]")(token_ids)


def test_a_game_is_played_to_its_end_and_its_reward_belongs_to_the_last_turn(codec):
    """Of 20 numbers, halving finds any within five guesses."""
    task, turns = textarena_task("GuessTheNumber-v0", codec), set()
    for index in range(12):
        player = Halving(codec)
        rollout = asyncio.run(task.run(task.prompt(index), player))
        assert rollout.facts.turns <= 5
        assert [reward.value for reward in rollout.rewards] == [0.0] * (rollout.facts.turns - 1) + [1.0]
        assert player.seen.count("You are playing Guess The Number") == 1  # the history is not repeated
        turns.add(rollout.facts.turns)
    assert len(turns) > 1


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "2048-v0", "Minesweeper-v0-small", "FifteenPuzzle-v0"])
def test_an_episode_is_repeated_whatever_else_draws_random_numbers(codec, name):
    """2048 draws a new tile after every move."""
    task, moves = textarena_task(name, codec), ["[up]", "[left]", "[down]", "[right]"] * 2

    def observed(noise: int) -> list[str]:
        game = Game(name)
        state = random.getstate()
        said = [game.reset(seed=3)[0]]
        random.setstate(state)
        for move in moves:
            random.seed(noise)
            text, _, done, _, _ = game.step(move)
            said.append(text)
            if done:
                break
        return said

    assert observed(1) == observed(2)
    before = random.getstate()
    assert task.prompt(5) == task.prompt(5)
    assert random.getstate() == before
    training, held_out = ({task._begin(p.data["number"])[1] for p in some} for some in (
        [task.prompt(index) for index in range(8)], task.held_out(8),
    ))  # fmt: skip
    if name == "FifteenPuzzle-v0":  # its first board shows the seed
        assert len(training) == len(held_out) == 8 and not training & held_out


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("GuesTheNumber-v0", "TextArena has no such game; did you mean GuessTheNumber-v0"),
     ("TicTacToe-v0", "cannot be started for one player: The number of players has to be 2"),
     ("MarketEntryGame-v0", "not a game for one player"), ("GuessWho-v0", "OpenRouter API key not found")],
)  # fmt: skip
def test_a_game_that_cannot_be_played_is_refused_in_one_line(codec, name, complaint, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(SoleraError, match=complaint) as raised:
        textarena_task(name, codec)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"task textarena:{name}")


def test_a_run_plays(tmp_path):
    found = command(
        "train", "--task", "textarena:Cryptarithm-v0", "--model", "embedded_agent", "--run.steps", "2",
        "--run.root", "runs", "--collect.prompts", "2", "--collect.group_size", "4", "--sampling.max_tokens", "4",
        "--evaluate.problems", "2", "--report.page", "false", "--collect.errors", "missing", cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    found = command("train", "--task", "textarena:Nothing-v9", "--model", "embedded_agent", cwd=tmp_path)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1 and "no such game" in found.stderr

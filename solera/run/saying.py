"""Prints notes on the console."""

from rich.console import Console
from rich.text import Text

from solera.config import Config
from solera.errors import counted


def say(console: Console, sentence: str) -> None:
    console.print(Text(f"note: {sentence}"), soft_wrap=True)


def say_if_fewer(console: Console, config: Config, found: int) -> None:
    if found < config.evaluate.problems:
        say(
            console,
            f"evaluate.problems is {config.evaluate.problems}, but the task has only "
            f"{counted(found, 'held-out problem')}: evaluations use all of them",
        )

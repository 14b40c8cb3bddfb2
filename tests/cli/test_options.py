"""Help as a person reads it in a terminal of 80 columns."""

import pytest

from tests.test_cli import solera

COMMANDS = ["", "train", "eval", "data", "data stats", "data verify", "data import", "data export", "data reward",
            "sweep", "report", "algorithms", "bench", "lab"]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_is_wider_than_the_terminal(command):
    done = solera(*command.split(), "--help", COLUMNS="80")
    assert done.returncode == 0 and not done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_can_be_printed_in_ascii(command):
    done = solera(*command.split(), "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_description_is_as_wide_as_the_terminal_and_stands_between_usage_and_options():
    narrow, wide = (solera("train", "--help", COLUMNS=columns).stdout for columns in ("60", "100"))
    assert narrow.startswith("usage: solera train [FILE.toml] [-h] [OPTIONS]\n\nTrain a model. ")
    for shown, columns in ((narrow, 60), (wide, 100)):
        first, second, *_ = shown.split("\n\n")[1].splitlines()
        assert len(first) <= columns < len(f"{first} {second.split()[0]}")
    assert narrow.index("with all its fields.") < narrow.index("options ─")


def test_the_help_of_a_field_is_one_paragraph():
    """The source breaks it after "at once and"."""
    shown = solera("train", "--help", COLUMNS="80").stdout
    assert "How many responses are written at once and how many tokens are learned" in shown

"""What is on while torch is imported, and what is off; text of users is printed as it is."""

import gc
from io import StringIO

import pytest
from rich.console import Console

from solera.report.console import Attempting, loading
from solera.run.saying import say


def test_garbage_is_collected_again_once_torch_is_loaded():
    with loading(Console(quiet=True)):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading(Console(quiet=True)):
        raise ImportError("torch is not installed")
    assert gc.isenabled()


MARKED = "no closing [/INST] in [the] answer :cat: 7"


def test_a_note_is_printed_as_it_is():
    told = StringIO()
    say(Console(file=told, force_terminal=True, width=20), MARKED)
    assert told.getvalue() == f"note: {MARKED}\n"


def test_the_name_of_a_model_that_is_evaluated_is_shown_as_it_is():
    told = StringIO()
    with Attempting(Console(file=told, force_terminal=True, color_system=None, width=120)) as progress:
        progress(MARKED, 1, 2)
    assert MARKED in told.getvalue()

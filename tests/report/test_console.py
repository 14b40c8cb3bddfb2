"""What is on while torch is imported, and what is off."""

import gc

import pytest
from rich.console import Console

from solera.report.console import loading


def test_garbage_is_collected_again_once_torch_is_loaded():
    with loading(Console(quiet=True)):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading(Console(quiet=True)):
        raise ImportError("torch is not installed")
    assert gc.isenabled()

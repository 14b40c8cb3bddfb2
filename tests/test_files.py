"""Files that appear whole or not at all."""

import errno

import pytest

from solera.files import appearing, write_whole


def write_half(path):
    path.write_text("ne")
    raise ZeroDivisionError


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    target = write_whole(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), appearing(target) as unfinished:
        write_half(unfinished)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(("at_fault", "named"), [(None, "a.txt"), ("store.db", "store.db")])
def test_a_full_disk_names_the_file_and_another_fault_keeps_its_own_place(tmp_path, at_fault, named):
    with pytest.raises(OSError, match="No space left") as refusal, appearing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "No space left on device", at_fault)
    assert str(refusal.value.filename).endswith(named)
    assert not list(tmp_path.iterdir())

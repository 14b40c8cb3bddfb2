"""Files that appear whole or not at all, folders that can be checked, and who holds them."""

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from solera.errors import SoleraError
from solera.folder.files import (
    PIECE,
    DamagedError,
    alone,
    appearing,
    check_sealed,
    refuse_gone,
    seal,
    writable,
    write_whole,
)


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


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    target = tmp_path / "a.png"
    with appearing(target) as first:
        with appearing(target) as second:
            first.write_text("first")
            second.write_text("second")
            assert first.suffix == second.suffix == ".png"  # by which matplotlib chooses a format
        assert target.read_text() == "second"
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_writer_left_is_removed_a_day_later(tmp_path):
    """The other file's name has characters that mean something in a pattern."""
    old, new, other = (tmp_path / f".unfinished-{n}abcdef0-{name}" for n, name in ((1, "[a]"), (2, "[a]"), (3, "a")))
    for path, age in ((old, 90_000), (new, 3600), (other, 90_000)):
        path.write_text("half")
        os.utime(path, (time.time() - age,) * 2)
    write_whole(tmp_path / "[a]", "whole")
    assert set(tmp_path.iterdir()) == {tmp_path / "[a]", new, other}


@contextmanager
def pipe_that_is_read(path):
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        yield pool.submit(path.read_text)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    (tmp_path / "link").symlink_to("pipe")
    with pipe_that_is_read(pipe) as read:
        assert writable(tmp_path / "link", "--out") == tmp_path / "link"
        write_whole(tmp_path / "link", "text")
        assert read.result(60) == "text"
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path, there):
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    link.symlink_to("folder/file")
    if there:
        file.write_text("old")
    writable(link, "--out")
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link"]


@pytest.fixture
def sealed(tmp_path):
    folder = tmp_path / "sealed"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(bytes(range(256)) * 10)
    seal(folder / "inner")
    (folder / "large").write_bytes(bytes(PIECE) + b"end")
    (folder / "empty").touch()
    seal(folder)
    return folder


def test_a_sealed_folder_is_as_it_was(sealed, tmp_path):
    assert check_sealed(sealed) and check_sealed(sealed / "inner")
    (sealed / "added").write_text("a file that nobody sealed")
    assert check_sealed(sealed)
    assert not check_sealed(tmp_path)
    listed = json.loads((sealed / "digests.json").read_text())
    assert set(listed) == {"large", "empty", "inner/digests.json"}
    assert listed["large"][0] == PIECE + 3


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, PIECE + 2])
def test_one_bit_is_noticed_in_any_piece_of_a_file(sealed, place):
    with (sealed / "large").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DamagedError, match=r"^large is damaged"):
        check_sealed(sealed)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("large", b"", "large is damaged"), ("large", bytes(PIECE) + b"end.", "large is damaged"),
        ("empty", b"x", "empty is damaged"), ("large", None, "large is missing"),
        ("inner/digests.json", b"{}", "inner/digests.json is damaged"),
        *(("digests.json", text, "^digests.json is damaged") for text in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000)),
        ("digests.json", b'{"large": 3}', "large is damaged"), ("digests.json", b'{"largf": []}', "largf is missing"),
    ],
)  # fmt: skip
def test_a_changed_folder_is_refused(sealed, name, content, says):
    (sealed / name).unlink()
    if content is not None:
        (sealed / name).write_bytes(content)
    with pytest.raises(DamagedError, match=says):
        check_sealed(sealed)


def test_a_folder_is_held_by_one_and_can_be_held_again(tmp_path):
    with alone(tmp_path), pytest.raises(SoleraError, match="another process is training this run"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_a_file_that_was_deleted_or_replaced_is_gone(tmp_path):
    path = tmp_path / "file"
    path.write_text("first")
    opened = path.stat()
    path.write_text("the same file with more in it")
    refuse_gone(path, opened)
    (tmp_path / "other").write_text("second")
    (tmp_path / "other").replace(path)
    with pytest.raises(OSError, match="deleted or replaced while it was in use"):
        refuse_gone(path, opened)
    path.unlink()
    with pytest.raises(OSError, match="deleted or replaced while it was in use"):
        refuse_gone(path, opened)

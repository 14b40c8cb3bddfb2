"""What a report says in words of a run's metrics."""

import json

import pytest

from solera.folder.account import Account, append_account
from solera.report.run_folder import read_run
from solera.report.summary import _account, _unused
from tests.report.runs import write_run


def test_what_is_not_used_is_a_share_of_what_was_drawn_not_of_what_was_generated(tmp_path):
    """Drawn 60 + 20 + 20 tokens, of which 60 trained on; only 10 were generated."""
    rows = [
        {"step": 0, "tokens/generated": 10, "tokens/trained": 20, "waste/stale": 10, "waste/zero_variance": 20},
        {"step": 1, "tokens/generated": 0, "tokens/trained": 40, "waste/stale": 20, "waste/dropped": 20},
    ]
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _unused(read_run(tmp_path)) == "equal rewards 20%, dropped by the objective 20%"


WHOLE = b'{"step": 4, "tokens/generated": 9, "tokens/trained": 5, "tokens/dropped/too_old": 3, "tokens/lost": 1}\n'
SAID = {"generated": 9, "trained": 5, "dropped: too old": 3, "lost": 1}
LATER = WHOLE.replace(b'"step": 4', b'"step": 8')


@pytest.mark.parametrize(
    ("written", "says", "notes"),
    [
        (None, {}, 0), (b"", {}, 0), (WHOLE, SAID, 0), (WHOLE + LATER[:30], SAID, 1),
        (WHOLE + LATER[:30] + LATER, SAID, 1), (WHOLE + b"{}\n", SAID, 1), (WHOLE + b"\xff}\n", SAID, 1),
        (WHOLE + b'{"step": 8, "tokens/generated": "9", "tokens/trained": 5}\n', SAID, 1),
        (WHOLE + b'{"step": 8, "tokens/generated": 9}\n', SAID, 1), (WHOLE + b"[" * 100_000 + b"]\n", SAID, 1),
        (b"{}\n", {}, 1), (LATER[:30], {}, 1),
    ],
)  # fmt: skip
def test_the_account_is_the_last_whole_line_and_damage_is_noted(tmp_path, written, says, notes):
    """9 = 5 + 3 + 1."""
    folder = write_run(tmp_path / "run", [{"step": 0, "eval/pass@1": 0.5}])
    if written is not None:
        (folder / "account.jsonl").write_bytes(written)
    run = read_run(folder)
    assert _account(run) == says
    told = [note for note in run.notes if "account.jsonl" in note]
    assert len(told) == notes
    assert not notes or ("step 4" if says else "not known") in told[0]


def test_a_line_of_the_account_is_ended_even_if_it_has_one_character(tmp_path):
    (tmp_path / "account.jsonl").write_bytes(b"{")
    append_account(tmp_path / "account.jsonl", 8, Account())
    assert (tmp_path / "account.jsonl").read_bytes().startswith(b'{\n{"step": 8')


def test_a_line_of_the_account_begins_below_one_that_a_kill_cut_off(tmp_path):
    folder = write_run(tmp_path / "run", [{"step": 0, "eval/pass@1": 0.5}])
    (folder / "account.jsonl").write_bytes(WHOLE + LATER[:30])
    append_account(folder / "account.jsonl", 8, Account(generated=7, trained=7))
    append_account(folder / "account.jsonl", 9, Account(generated=8, trained=8))
    lines = (folder / "account.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[:2] == [WHOLE, LATER[:30] + b"\n"] and len(lines) == 4
    run = read_run(folder)
    assert _account(run) == {"generated": 8, "trained": 8}
    assert not [note for note in run.notes if "account.jsonl" in note]

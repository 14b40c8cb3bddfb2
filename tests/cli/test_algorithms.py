"""`solera algorithms`: all objectives at one look, and one of them in full."""

from solera.objectives.table import TABLE
from tests.command import solera


def test_lists_every_objective_and_marks_the_default():
    listed = solera("algorithms", COLUMNS="80")
    assert listed.returncode == 0
    overview, closing = listed.stdout.split("\n\n")
    assert [line.split()[0] for line in overview.splitlines() if not line.startswith(" ")] == list(TABLE)
    assert [line.split()[0] for line in overview.splitlines() if "(default)" in line] == ["rec_oneside_nois_wide"]
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert "`solera algorithms NAME`" in " ".join(closing.split())


def test_shows_one_with_its_formula_and_fields():
    shown = solera("algorithms", "rec_ring_is_wide", COLUMNS="80").stdout
    assert shown.startswith("rec_ring_is_wide\n  −sg(ρ·M)·A·ℓ, M: ring clip\n")
    assert "ring_high = 4.0" in shown
    assert "clip = ring (one of none, one_side, two_side, ring)" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert solera("algorithms", "rec_oneside_nois_wide").stdout.startswith("rec_oneside_nois_wide (default)\n")
    wrong = solera("algorithms", "rec_rings")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean rec_ring" in wrong.stderr


def test_shows_fields_that_act_once_they_are_set():
    shown = solera("algorithms", "grpo").stdout
    assert "\n  whiten_epsilon = 1e-08\n" in shown
    assert "\n  dual_clip is unset\n" in shown
    assert "ref_period is unset" not in shown
    assert "\n  ref_period is unset\n" in solera("algorithms", "opmd_kimi").stdout
    assert "dual_clip" not in solera("algorithms", "cispo").stdout


def test_a_terminal_without_greek_gets_its_names():
    done = solera("algorithms", "grpo", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "-min(rhoA, clip(rho, 1-epsilon_l, 1+epsilon_h)*A) + beta*KL" in done.stdout
    assert "`k2_token` is (l-b)^2" in done.stdout

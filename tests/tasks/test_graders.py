"""Graders: what counts as the answer."""

from solera.tasks.graders import exact, verbatim


def test_exact_strips_verbatim_does_not_and_neither_takes_a_text_cut_off():
    assert exact(" 82\n", "82", True)
    assert exact("82", " 82 ", True)
    assert not exact("82", "82", False)
    assert not exact("82 3", "823", True)
    assert verbatim("82", "82", True)
    assert not verbatim("82 ", "82", True)
    assert not verbatim("82", "82", False)

"""The number a text comes to, and that no text takes long to read."""

import time
from fractions import Fraction

import pytest

from solera.tasks.numbers import final_number, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("The answer is 42.", 42), ("42,", 42), ("-7", -7), ("−7", -7), ("+7", 7), ("007", 7),
        ("x=-0.50", Fraction(-1, 2)),
        ("5-3", 2), ("10-12", None), ("(4)-1", 3), ("from 3 to -3", None),
        (".5", Fraction(1, 2)), ("-.5", Fraction(-1, 2)),
        ("1,234", 1234), ("1,234,567.89", Fraction(123456789, 100)), ("1,2", None), ("2020,300", None),
        ("3/4", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)), ("3 / 4", Fraction(3, 4)), ("6/8 of it", Fraction(3, 4)),
        ("$12.50", Fraction(25, 2)), ("-$5", -5), ("$-5", -5), ("€3", 3), ("£1,000", 1000), ("50%", 50),
        ("12.5 %", Fraction(25, 2)),
        ("#### 42", 42), ("1 + 1 = 2\n#### 2\n(3 steps)", 2), ("####-3 and 4", None), ("#### 1 #### 2", 2),
        (r"\boxed{42}", 42), (r"\boxed{42} after 3 steps", 42), (r"\boxed{x = \{42\}} 7", 42),
        (r"\boxed{1} \boxed{-2}", None),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)), (r"\dfrac{1}{2}", Fraction(1, 2)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        ("1e3", 1000), ("2.5E-1", Fraction(1, 4)), ("it is 6e", 6), ("2 apples and 3 pears", None),
        ("x2", None), ("x_2", None), ("cm^2", None), ("2^3", 8), ("5π", None),
        ("1e401", None), ("2^401", None), ("0^{-1}", None), ("9^9^9", None),
        ("", None), ("none", None), ("-", None), ("3/0", None), ("####", None), (r"4 \boxed{}", None),
        ("1" * 401, None),
        ("2 x 10^3", 2000), ("3**2", 9), ("x = - 7", -7), (r"\$5", 5), (r"\frac34", Fraction(3, 4)), (r"2\cdot 3", 6),
        (r"\(x\) so it is 3 and USD 1/2", Fraction(7, 2)),
        ("so it is ½", Fraction(1, 2)), ("it is 1 ½", Fraction(3, 2)),
        ("10^{2}", 100), (r"2\pi", None), ("1{,}000", 1000), ("so negative 5", -5), ("5 cm^{2}", 5),
        (r"\boxed{-(-5)}", 5), (r"\boxed{-\left(-5\right)}", 5), (r"\boxed{-(5)}", -5), ("#### -(-1,234)", 1234),
        (r"\boxed{-(-\frac{1}{2})}", Fraction(1, 2)), ("= -( -3/4 )", Fraction(3, 4)), ("8-(5)", 3), ("8 -(-5)", 13),
    ],
)  # fmt: skip
def test_the_number_a_text_comes_to(text, value):
    assert final_number(text)[0] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Größe: so it is twelve", 12), ("Größe: so it is ätwelve", None), ("It is fourteen – très bien", 14),
        ("It is umpteen", None), ("so it is 3 + USD 4", 7), ("It costs Rs. 3 + Rs. 4", 7), ("It is 1'000", 1000),
        ("It is a 12/4 part", 3), ("So it is Half of 48", 24), ("so it is twice 36", 72), ("It is 5-(2)", 3),
        ("so it is 2**3", 8), ("The answer is 72.  \n", 72), ("72 was our final answer. She sold 24.", 72),
        ("72 should be your correct answer. She sold 24 in May.", 72), ("The answer is 72 BECAUSE 48 + 24 = 73", 72),
        ("The answer is 72 ſince 48 + 24 = 73", 72), ("#### -1,234.50", Fraction(-2469, 2)),
    ],
)  # fmt: skip
def test_what_is_searched_first_hides_no_spelling(text, value):
    assert final_number(text)[0] == value


def test_number_compares_values_not_spellings():
    assert number("0.750", "3/4", True)
    assert number("so 1,000 dollars", "#### 1000.0", True)
    assert not number("0.333", "1/3", True)
    assert not number("no idea", "3", True)


def test_a_number_cut_off_may_not_be_complete():
    assert not number("the answer is 42", "42", False)
    assert not number("the answer is 42.", "42", False)
    assert not number("#### 42", "42", False)
    assert not number(r"\boxed{42", "42", False)
    assert not number("42 it is, bec", "42", False)
    assert number("42 it is. Bec", "42", False)
    assert number("it is 42\n", "42", False)
    assert number(r"\boxed{42}", "42", False)


@pytest.mark.parametrize(
    "piece",
    [
        "9",
        "1,",
        ",111",
        "-",
        "{",
        "\\frac{",
        "9/",
        " ",
        "1e",
        "####",
        ".",
        "\\boxed{",
        "1.",
        "$",
        "}",
        "\\frac{1}{1",
        "10^",
        "½",
        "²",
        "√",
        "= - ",
        "1 ",
        "11,",
        "(=",
        "_",
        ".0\\overline{",
        "answer: ",
        "</answer>",
        "#### 1\n",
        "1+",
        "(",
        "1 or ",
        "one ",
        "not ",
        "Wait, ",
        "The answer is not 1. ",
        "check ",
        "**1",
        "1 (a",
    ],
)
def test_no_text_takes_quadratic_time(piece):
    def seconds(size: int) -> float:
        start = time.process_time()
        number(piece * (size // len(piece)), "1", True)
        number("\\boxed{" + piece * (size // len(piece)), "1", True)
        return time.process_time() - start

    assert seconds(400_000) < max(40 * seconds(40_000), 0.2)  # quadratic would be 100 times


@pytest.mark.parametrize("mark", ["*", "_", "* ", "**_", " *"])
def test_emphasis_before_the_last_number_does_not_take_quadratic_time(mark):
    def seconds(size: int) -> float:
        start = time.process_time()
        number(mark * (size // len(mark)) + " 7", "7", True)
        return time.process_time() - start

    assert seconds(4_000) < max(8 * seconds(1_000), 0.3)  # quadratic is 16 times, and over a second


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("The answer is 72. That is right.", "I hope it helps."), ("#### 72", "error"), ("It is 72 here.", "Wait, no"),
        ("So 48 + 24 = 72.", "is that right?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("blank", ["\n", " ", "\t", " \n", "\n\n  "])
def test_blank_lines_before_a_word_of_a_retraction_do_not_take_quadratic_time(before, after, blank):
    def seconds(size: int) -> float:
        start = time.process_time()
        number(before + blank * (size // len(blank)) + after, "72", True)
        return time.process_time() - start

    assert seconds(4_000) < max(8 * seconds(1_000), 0.3)  # quadratic is 16 times, and more than a second


@pytest.mark.parametrize("blank", ["", " ", "\n", "\n\n\n", "\n  \n\t"])
def test_a_retraction_after_blank_lines_still_counts(blank):
    assert number(f"The answer is 70.{blank} Wait, that is wrong: it is 72.", "72", True)
    assert not number(f"The answer is 70.{blank} Wait, that is wrong: it is 72.", "70", True)


def test_blanks_after_a_heading_do_not_take_quadratic_time():
    def seconds(size: int) -> float:
        start = time.process_time()
        number("72\nanswer" + "\t" * size + "x", "72", True)
        return time.process_time() - start

    assert seconds(16_000) < max(8 * seconds(4_000), 0.3)  # quadratic is 16 times, and about a second

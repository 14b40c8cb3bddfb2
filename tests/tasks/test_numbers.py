"""The number a text comes to, and that no text takes long to read."""

import time
from fractions import Fraction
from random import Random

import pytest

from solera.tasks.final import last_match
from solera.tasks.numbers import _NUMBER, _is_whole, _last_of_all, _plain, _value, final_number, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("The answer is 42.", 42), ("42,", 42), ("-7", -7), ("−7", -7), ("+7", 7), ("007", 7),
        ("x=-0.50", Fraction(-1, 2)),
        ("5-3", 3), ("10-12", 12), ("(4)-1", 1), ("from 3 to -3", -3), (".5", Fraction(1, 2)), ("-.5", Fraction(-1, 2)),
        ("1,234", 1234), ("1,234,567.89", Fraction(123456789, 100)), ("1,2", 2), ("2020,300", 300),
        ("3/4", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)), ("3 / 4", Fraction(3, 4)), ("6/8 of it", Fraction(3, 4)),
        ("$12.50", Fraction(25, 2)), ("-$5", -5), ("$-5", -5), ("€3", 3), ("£1,000", 1000), ("50%", 50),
        ("12.5 %", Fraction(25, 2)),
        ("#### 42", 42), ("1 + 1 = 2\n#### 2\n(3 steps)", 2), ("####-3 and 4", -3), ("#### 1 #### 2", 2),
        (r"\boxed{42}", 42), (r"\boxed{42} after 3 steps", 42), (r"\boxed{x = \{42\}} 7", 42),
        (r"\boxed{1} \boxed{-2}", -2),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)), (r"\dfrac{1}{2}", Fraction(1, 2)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        ("1e3", 1000), ("2.5E-1", Fraction(1, 4)), ("it is 6e", 6), ("2 apples and 3 pears", 3),
        ("x2", None), ("x_2", None), ("cm^2", None), ("2^3", 8), ("5π", None),
        ("1e401", None), ("2^401", None), ("0^{-1}", None), ("9^9^9", 9**9),
        ("", None), ("none", None), ("-", None), ("3/0", None), ("####", None), (r"4 \boxed{}", None),
        ("1" * 401, None),
        ("2 x 10^3", 2000), ("3**2", 9), ("x = - 7", -7), (r"\$5", 5), (r"\frac34", Fraction(3, 4)), (r"2\cdot 3", 3),
        (r"\(x\) so it is 3 and USD 1/2", Fraction(7, 2)),
        ("so it is ½", Fraction(1, 2)), ("about ¾ of 1 ½ or 2½", Fraction(5, 2)), ("it is 1 ½", Fraction(3, 2)),
        ("10^{2}", 100), (r"2\pi", None), ("1{,}000", 1000), ("so negative 5", -5), ("5 cm^{2}", 5),
        (r"\boxed{-(-5)}", 5), (r"\boxed{-\left(-5\right)}", 5), (r"\boxed{-(5)}", -5), ("#### -(-1,234)", 1234),
        (r"\boxed{-(-\frac{1}{2})}", Fraction(1, 2)), ("= -( -3/4 )", Fraction(3, 4)), ("8-(5)", 5), ("8 -(-5)", -5),
        ("- (2) then", 2), ("10 apples\nminus 5", 5), ("10 apples\n\nminus 5", 5),
    ],
)  # fmt: skip
def test_the_number_a_text_comes_to(text, value):
    assert final_number(text)[0] == value


PIECES = (
    "5", "12", "1,234", "-3", "= - 7", "-$5", "$-5", "3 1/2", "3 and 1/2", "½", "３", "−5", "–6", "10^5", "2 x 10^3",
    "3**2", "cm^2", "cm²", "²⁻²", "x^{2\n}", "x^{, and 2}", "{", "}", "1{,}000", r"\frac{1}{2}", "\\sqrt{2\n3}", "√2",
    "2 * π", "CO2", "USD 5", "-Rs. 5", "-Rs.", "negative 5", "Negative ", "and ", "x ", "10", "1e-3", "5_000", "5'000",
    "minus 5", "is", "_5", "x/2", "5/2.5", "1 000", ".5", "5.", "-", "=", "/", "^", "\n", ". ", ", ", ": ", " ",
    "-(-5)", "-(7)", "(", "apples", " Then", "we go on. After that ", r"\times ", r"\text{of ", r"\sqrt[a b]2", "5e3x",
)  # fmt: skip


def test_the_last_number_is_that_of_the_whole_text_read_at_once():
    """Texts of a few awkward pieces each, long enough to be read from their last digit alone."""
    random, found = Random(0), 0
    for _ in range(10_000):
        text = "".join(random.choices(random.sample(PIECES, 8), k=random.choice((12, 40))))
        match = last_match(_NUMBER, _plain(text))
        assert _last_of_all(text) == ((_value(match), _is_whole(match)) if match else (None, False)), text
        found += _last_of_all(text)[0] is not None
    assert found > 7_000


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
    ],
)
def test_no_text_takes_quadratic_time(piece):
    def seconds(size: int) -> float:
        start = time.process_time()
        number(piece * (size // len(piece)), "1", True)
        number("\\boxed{" + piece * (size // len(piece)), "1", True)
        return time.process_time() - start

    assert seconds(400_000) < max(40 * seconds(40_000), 0.2)  # quadratic would be 100 times

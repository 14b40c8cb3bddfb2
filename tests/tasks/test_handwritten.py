"""The grader `number` on answers as people and models write them, with a human reader's verdict.

`pairs/handwritten.jsonl` has four sets: the reproductions of the issue, and three that were written before the grader
was run on them. At its first run it judged 9 of the first 269 otherwise (with the issue's), 22 of the second 278, and
13 of the third 151. The author of the sets also wrote the grader.
"""

import json
from pathlib import Path

import pytest

from solera.tasks.numbers import number

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "pairs" / "handwritten.jsonl").read_text(encoding="utf-8").splitlines()
]
NOT_READ = {
    "The answer is 180. Let me recheck. He runs three days, so 540.",
    "The answer is 12 - 4 quarters with 3 months each.",
    "Answer:\na) 9 eggs\nb) 18 dollars",
    "Answer: 16 eggs\n- 7 eggs\n= 9 eggs\n9 × $2 = $18",
    "Janet makes $18 every day. She sells 9 eggs at $2 each.",
    "She makes $18 per day, which is $126 per week.",
}
"""Right answers that are not recognised."""


def test_a_wrong_answer_is_never_accepted():
    assert len(ROWS) > 690
    assert [row for row in ROWS if not row["right"] and number(row["text"], row["answer"], True)] == []


def test_right_answers_are_accepted():
    refused = {row["text"] for row in ROWS if row["right"] and not number(row["text"], row["answer"], True)}
    assert refused == NOT_READ


@pytest.mark.parametrize("unit", ["", " clips", " hair clips", " km", "%", " dollars in total"])
@pytest.mark.parametrize("form", ["#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "Answer: {}"])
def test_every_form_holds_numbers_terms_sizes_and_no_negation(form, unit):
    def verdict(value, answer):
        inside = f"{value}\\text{{{unit}}}" if form.startswith("\\") and unit and unit != "%" else value + unit
        return number(form.format(inside.replace("%", "\\%") if form.startswith("\\") else inside), answer, True)

    assert verdict("72", "72")
    assert verdict("1,072", "1072")
    assert verdict("10 072", "10072")
    assert verdict("-72", "-72")
    assert verdict("48 + 24", "72")
    assert not verdict("48 + 24", "48")
    assert not verdict("48 + 24", "24")
    assert verdict("48 + 24 = 72", "72")
    assert verdict("2 million", "2000000")
    assert not verdict("2 million", "2")
    assert not verdict("5:30", "5")
    assert not verdict("5:30", "30")
    assert not verdict("not 72", "72")
    assert not verdict("72 or 74", "72")
    assert not verdict("72 or 74", "74")
    assert not verdict("70-74", "74")

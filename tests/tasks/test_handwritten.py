"""The grader `number` on answers as people and models write them, with a human reader's verdict.

`pairs/handwritten.jsonl` has four sets: the reproductions of the issue, and three that were written before the grader
was run on them. At its first run it judged 9 of the first 269 otherwise (with the issue's), 22 of the second 278, and
13 of the third 151. The author of the sets also wrote the grader.

`pairs/blind.jsonl` was written by someone who had not read the grader. At its first run the grader judged 7 of the 200
otherwise. `pairs/variations.jsonl` has four sets by the author of the fixes for those seven. Each was written before
the grader was run on it: 1 of 62, 16 of 74, 6 of 50 and 7 of 50 were judged otherwise.

`pairs/blind2.jsonl` was written by another reader who had not seen the grader, after those fixes. At its first run the
grader judged 2 of the 200 otherwise, and no rule was changed for them.
"""

import json
import re
from pathlib import Path

import pytest

from solera.tasks.numbers import answer_number, final_number, number


def rows(name):
    file = Path(__file__).parent / "pairs" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


ROWS = rows("handwritten")
NOT_READ = {
    "The answer is 180. Let me recheck. He runs three days, so 540.",
    "The answer is 12 - 4 quarters with 3 months each.",
    "Answer:\na) 9 eggs\nb) 18 dollars",
    "Answer: 16 eggs\n- 7 eggs\n= 9 eggs\n9 × $2 = $18",
    "Janet makes $18 every day. She sells 9 eggs at $2 each.",
    "She makes $18 per day, which is $126 per week.",
}
"""Right answers that are not recognised."""
MISJUDGED = {
    "You can't divide 7 apples evenly among 2 kids, so each gets 3 apples and 1 is left.",
    "Altogether they walked 27 miles, stopping 3 times.",
    "She saves 15 percent, i.e., 0.15 * 200 = 30 dollars, and pays 170 dollars.",
    "Also bleiben ihm 7,50 Euro.",
    "The train arrives after 4.25 hours, i.e. 4 hours and 15 minutes.",
    "The solution is x = 42 and the check gives 42 / 6 = 7.",
    "The cost is 42 dollars and 50 cents.",
    "print(6*7)",
}
"""Variations that the grader judges otherwise. One of them is accepted and should not be: code that nobody ran."""


def test_a_wrong_answer_is_never_accepted():
    assert len(ROWS) > 690
    assert [row for row in ROWS if not row["right"] and number(row["text"], row["answer"], True)] == []


def test_right_answers_are_accepted():
    refused = {row["text"] for row in ROWS if row["right"] and not number(row["text"], row["answer"], True)}
    assert refused == NOT_READ


def test_every_verdict_of_the_blind_set_agrees():
    blind = rows("blind")
    assert len(blind) == 200
    assert [row for row in blind if number(row["text"], row["answer"], True) != row["right"]] == []


def test_the_second_blind_set_is_judged_as_it_was_at_first():
    blind = rows("blind2")
    assert len(blind) == 200
    misjudged = [row for row in blind if number(row["text"], row["answer"], row["finished"]) != row["right"]]
    assert [row["why"] for row in misjudged] == [
        "German decimal comma",
        "different answers in marker and sentence, hedged",
    ]


@pytest.mark.parametrize("name", ["handwritten", "blind", "blind2", "variations"])
def test_a_quick_no_never_differs_from_a_full_reading(name):
    """Also where the wanted number is another one of the text, or one of another text."""
    found = rows(name)
    for row, other in zip(found, found[1:] + found[:1], strict=True):
        for wanted in {row["answer"], other["answer"], *re.findall("[0-9]+", row["text"])[:4]}:
            value = answer_number(wanted)
            expected = value is not None and final_number(row["text"])[0] == value
            assert number(row["text"], wanted, True) == expected, (row["text"], wanted)


def test_variations():
    varied = rows("variations")
    assert len(varied) > 230
    misjudged = [row for row in varied if number(row["text"], row["answer"], True) != row["right"]]
    assert {row["text"] for row in misjudged} == MISJUDGED
    assert [row["text"] for row in misjudged if not row["right"]] == ["print(6*7)"]


@pytest.mark.parametrize(
    "end",
    [
        "####",
        "#### ",
        "\n\\boxed{}",
        "$\\boxed{\\quad}$",
        "<answer> </answer>",
        "**Final Answer**",
        "The answer is",
        "48 + 24 =",
    ],
)
def test_an_announced_answer_that_is_not_given_is_none_unless_another_was_stated(end):
    assert not number(f"She sold 48 clips in April and 24 in May.\n{end}", "24", True)
    assert not number(f"48 + 24 = 72\n{end}", "72", True)
    assert number(f"48 + 24 = 72\nThe answer is 72.\n{end}", "72", True)


@pytest.mark.parametrize(
    "refusal",
    [
        "I am not sure.",
        "I'm unsure which one is right.",
        "I don't know.",
        "I do not know the rest",
        "It is impossible to determine the total.",
        "There is not enough information.",
        "The total can't be determined from this.",
        "I cannot give a final answer.",
        "We are unable to solve this.",
        "That can't be right.",
    ],
)
def test_a_refusal_at_the_end_leaves_no_answer_and_one_before_the_result_does_not_matter(refusal):
    assert not number(f"She sold 48 clips in April. {refusal}", "48", True)
    assert not number(f"48 + 24 = 72\n\n{refusal}", "72", True)
    assert number(f"At first: {refusal} Now 48 + 24 = 72, so she sold 72 clips.", "72", True)


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

"""Responses to two sums of reasoning-gym and their scores, written by hand from docs/tasks.md and from the task's own
rule: the same decimal number, commas aside, scores 1; a text that holds the answer, the share of its length; else 0."""

SUMS = {5: "859 + 467 - 914 + 807 + 961 + 857", 0: "1663 - 5242 - 9376 - 8961 + 7634"}
"""The positions of two problems, and what each asks for."""
RESULTS = {5: "3037", 0: "-14282"}
RIGHT = [
    "{n}", " {n}", "{n}\n", "\t{n} ", "{n}\n\n", "{n}.0", "{n}.000", "<answer>{n}</answer>", "<answer> {n} </answer>",
    "<answer>\n{n}\n</answer>", "I think <answer>{n}</answer>", "<answer>{n}</answer> for sure",
    "<answer>{n}.0</answer>",
    "<answer>1</answer><answer>{n}</answer>", "<answer>1</answer> no, <answer>{n}</answer>.",
    "<think>1</think><answer>{n}</answer>", "<think>the sum</think>{n}", "<think>the sum</think>\n\n{n}\n",
    "<think><answer>1</answer></think><answer>{n}</answer>", "<think>\\boxed{{1}}</think>{n}", "<think></think>{n}",
    "\\boxed{{{n}}}", "so \\boxed{{{n}}}.", "$\\boxed{{{n}}}$", "\\boxed{{1}} then \\boxed{{{n}}}", "\\boxed{{ {n} }}",
    "\\fbox{{{n}}}", "\\boxed{{1}} <answer>{n}</answer>", "<answer>{n}</answer> \\boxed{{1}}", "\\boxed{{{n}.00}}",
    "\\boxed{{{n}}} as \\boxed asks",
]  # fmt: skip
WRONG = [
    "", " ", "1", "0", "one", "no idea", "<answer></answer>", "<answer> </answer>", "<answer>1</answer>",
    "<answer>{n}</answer><answer>1</answer>", "{n} <answer>1</answer>", "<answer>{n}</answer><answer></answer>",
    "\\boxed{{1}}", "\\boxed{{}}", "\\boxed{{x}}", "{n} \\boxed{{1}}", "{n} \\boxed{{}}", "\\boxed{{{n}}}\\boxed{{1}}",
    "<think>{n}</think>1", "<think><answer>{n}</answer></think>1", "<think>\\boxed{{{n}}}</think>\\boxed{{2}}",
    "x" * 20_000, "{n} " + "x" * 10_000, "<answer>x</answer>", "9" * 9_000, "nan", "inf", "1e999999999",
]  # fmt: skip
HOLDING = {
    "The answer is {n}.": "The answer is {n}.", "**{n}**": "**{n}**", "= {n}": "= {n}", "{n} apples": "{n} apples",
    "<answer>The sum is {n}</answer>": "The sum is {n}", "\\boxed{{x = {n}}}": "x = {n}", "${n}$": "${n}$",
    "{n}!": "{n}!", "({n})": "({n})", "`{n}`": "`{n}`", "#### {n}": "#### {n}", "{n} or 1": "{n} or 1",
    "1 {n}": "1 {n}", "<answer>{n}": "<answer>{n}", "{n} <answer>": "{n} <answer>", "\\boxed{{{n}": "\\boxed{{{n}",
    "</answer>{n}<answer>": "</answer>{n}<answer>", "<Answer>{n}</Answer>": "<Answer>{n}</Answer>",
    "the sum is\n{n}": "the sum is\n{n}", "<think>a</think>It is {n}.": "It is {n}.", "{n}, I think": "{n} I think",
}  # fmt: skip
"""Responses, and what of them is scored."""
GYM = [
    pair
    for position, n in RESULTS.items()
    for pair in (
        *((text.format(n=n), position, 1.0) for text in RIGHT),
        *((text.format(n=n), position, 0.0) for text in WRONG),
        *((text.format(n=n), position, len(n) / len(scored.format(n=n))) for text, scored in HOLDING.items()),
    )
]

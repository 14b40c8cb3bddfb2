"""Responses to twenty tasks of reasoning-gym and whether they score 1, written by hand from docs/tasks.md."""

POSITION = 3
ANSWERS = {
    "basic_arithmetic": ("-61", ("61", "-62", "-6")),  # (56 - 33) - 84
    "gcd": ("1", ("2", "5", "gcd")),  # of 641, a prime, and 595
    "letter_counting": ("1", ("2", "one", "l")),  # l in "free the witness personality so that it may"
    "spell_backward": ("reyornac", ("canroyer", "reyornacs", "reyorn")),
    "leg_counting": ("256", ("255", "25", "-256")),  # 15 lobsters, 14 ducks, 8 beetles, 5 fireflies: 150 + 28 + 48 + 30
    "simple_equations": ("61", ("-61", "6", "h")),  # 405 h = 24705
    "base_conversion": ("243", ("242", "201", "f3")),  # 201 to the base 11
    "time_intervals": ("03:22:03", ("03:23:03", "15:22:03", "yes")),  # from 18:34:08 to 21:56:11
    "caesar_cipher": ("SIR DO NOT COUNT ON ME FOR HELP", ("SIR DO NOT COUNT ON ME FOR", "HELP", "ABC")),
    "calendar_arithmetic": ("Tuesday", ("Monday", "Wednesday", "2")),  # October 18, 2022
    "prime_factorization": ("5 × 7 × 7", ("5 × 49", "5 × 7", "2 × 3")),  # 245
    "number_sequence": ("170", ("171", "17", "210")),  # 5, 5, 10, 15, 25, 40, 65, 105
    "bitwise_arithmetic": ("0x3d2d", ("0x3d2e", "0x7a5b", "zero")),  # 0x7a5b >> 1
    "family_relationships": ("wife", ("husband", "mother", "a")),
    "isomorphic_strings": ("False", ("True", "maybe", "0")),  # ohota, qggip: o would be both q and g
    "course_schedule": ("False", ("True", "no idea", "1")),  # 1 needs 3 and 3 needs 1
    "products": ("2203636302", ("2203636303", "2", "22036363")),  # 81333 * 27094
    "complex_arithmetic": ("8.0 + 3.0i", ("8.0 - 3.0i", "3.0 + 8.0i", "8")),  # (7 - 6i) + (1 + 9i)
    "syllogism": ("Yes", ("No", "maybe", "Y")),
    "coin_flip": ("0.234375", ("0.5", "1", "a")),  # two heads in six: 15/64
}
"""The answer to the problem at that position of each task, and some wrong ones."""
RIGHT = (
    "{right}", " {right}\n", "<answer>{right}</answer>", "<answer>\n{right}\n</answer>",
    "So it is <answer>{right}</answer>.", "\\boxed{{{right}}}", "$\\boxed{{{right}}}$.", "<think>hm</think>\n{right}",
    "<think>not {wrong}</think><answer>{right}</answer>", "<think>\\boxed{{{wrong}}}</think>\n\\boxed{{{right}}}",
    "<answer>\\boxed{{{right}}}</answer>", "\\boxed{{{wrong}}} <answer>{right}</answer>",
    "\\boxed{{\\text{{{right}}}}}",
    "<answer>{wrong}</answer><answer>{right}</answer>", "<answer>It is \\boxed{{{right}}}.</answer>",
)  # fmt: skip
WRONG = (
    "{wrong}", "<answer>{wrong}</answer>", "\\boxed{{{wrong}}}", "<think>{right}</think>\n{wrong}", "",
    "<answer></answer>", "{right} <answer>{wrong}</answer>", "<answer>{right}</answer> no, <answer>{wrong}</answer>",
    "\\boxed{{{right}}} no, \\boxed{{{wrong}}}", "<answer>\\boxed{{{wrong}}}</answer> {right}",
)  # fmt: skip
GYM = sorted(
    {
        (template.format(right=right, wrong=wrong), task, templates is RIGHT)
        for task, (right, wrongs) in ANSWERS.items()
        for wrong in wrongs
        for templates in (RIGHT, WRONG)
        for template in templates
    }
)
"""Responses, tasks, and whether the score is 1."""

"""Responses cut off by the length limit, answers and verdicts, written by hand from docs/tasks.md."""

R, W = True, False

CUT = {
    "number": [
        ("#### 18", "18", W), ("#### 18\n", "18", R), ("#### 18\nNow", "18", R), ("#### 1", "18", W),
        (r"\boxed{18}", "18", R), (r"\boxed{18", "18", W),
        (r"The answer is \boxed{18}. Let me verify: 9 * 2 = 18, and 18 + 1 = 19", "18", R),
        ("The answer is 18", "18", W), ("The answer is 18.", "18", W), ("The answer is 18. We", "18", R),
        ("The answer is 18.\n", "18", R), ("The answer is 18 eggs", "18", W),
        ("She has 9 eggs, sold at $2, so she makes 18", "18", W), ("<answer>18</answer>", "18", R),
        ("<answer>18", "18", W), ("<think>let me see 9 * 2 = 18", "18", W), ("She makes 18 dollars and then", "18", W),
        ("She makes 18 dollars. Then", "18", R), ("She makes 18 dollars.\nThen", "18", R), ("She makes 18", "18", W),
        ("9 * 2 = 18\n", "18", R), ("#### 18 eggs", "18", W), ("#### 18 eggs\n#", "18", R),
        ("The answer is 18 eggs. ", "18", R), ("<answer>18</answer", "18", W), (r"\boxed{18} eggs", "18", R),
        (r"so \boxed{18} and \boxed{2", "18", W), ("The answer is 1", "1", W), ("The answer is 18, as", "18", W),
    ],
    "math": [
        (r"\boxed{5", "5", W), (r"\boxed{5}", "5", R), ("The answer is 5", "5", W),
        ("The answer is 5.\n\nLet", "5", R),
    ],
    "countdown": [
        ("<answer>3 * 7 + 5</answer>", "3 5 7 = 26", R), ("<answer>3 * 7 + 5", "3 5 7 = 26", W),
        ("3 * 7 + 5", "3 5 7 = 26", W), (r"\boxed{3*7+5}", "3 5 7 = 26", R), (r"\boxed{3*7+5", "3 5 7 = 26", W),
        ("<answer>3 * 7 + 5</answer> because", "3 5 7 = 26", R), ("The answer is 3 * 7 + 5", "3 5 7 = 26", W),
        ("The answer is 3 * 7 + 5. It", "3 5 7 = 26", R),
    ],
    "boxed": [
        (r"\boxed{5}", "5", R), (r"\boxed{5} and then", "5", R), (r"\boxed{5", "5", W),
        (r"\boxed{\frac{1}{2}", "5", W),
    ],
}  # fmt: skip

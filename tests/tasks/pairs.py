"""Responses, answers and verdicts, written by hand from the definitions in docs/tasks.md."""

R, W = True, False

NUMBER = [
    # plain
    ("42", "42", R), ("42.", "42", R), ("42.0", "42", R), ("42.00", "42", R), ("042", "42", R), ("+42", "42", R),
    ("-42", "-42", R), ("−42", "-42", R), ("–42", "-42", R), ("-42", "42", W), ("42", "-42", W), ("43", "42", W),
    ("4 2", "42", W), ("", "42", W), ("forty-two", "42", W), ("none", "42", W), ("-0", "0", R), ("0.0", "0", R),
    ("-0.00", "0", R), ("0", "0", R), ("", "0", W), ("42!", "42", R), ("(42)", "42", R), ("[42]", "42", R),
    ("**42**", "42", R), ("`42`", "42", R), ("\n\n42\n", "42", R), ("42\u00a0", "42", R), ("420", "42", W),
    ("4200%", "42", W),
    # commas, decimals, exponents
    ("1,234", "1234", R), ("1,234,567", "1234567", R), ("1,234.50", "1234.5", R), ("12,34", "1234", W),
    ("1234", "1,234", R), ("1\\,234", "1234", R), ("1{,}234", "1234", R), ("1\u202f234", "1234", R),
    (".5", "0.5", R), ("0.50", ".5", R), ("1.5e3", "1500", R), ("2.5E-1", "0.25", R), ("1.5 \\times 10^{3}", "1500", R),
    ("1.5 × 10^3", "1500", R), ("3 * 10^2", "300", R), ("0.3333", "1/3", W), ("0.25", "1/4", R),
    ("3.14159", "3.1416", W), ("100,00", "100", W), ("1e400", "5", W), ("1e-3", "0.001", R),
    # fractions
    ("3/4", "0.75", R), ("6/8", "3/4", R), ("-3/4", "-0.75", R), ("\\frac{3}{4}", "0.75", R),
    ("\\dfrac{3}{4}", "3/4", R),
    ("\\tfrac{1}{2}", "0.5", R), ("\\frac12", "0.5", R), ("-\\frac{1}{2}", "-0.5", R), ("1\\frac{1}{2}", "1.5", R),
    ("1 1/2", "1.5", R), ("2 \\frac{3}{4}", "2.75", R), ("3/0", "0", W), ("0/3", "0", R), ("4/3", "3/4", W),
    ("10/4", "2.5", R), ("1/3", "1/3", R), ("2/6", "1/3", R),
    # money, percent, units
    ("$42", "42", R), ("$42.00", "42", R), ("-$5", "-5", R), ("$-5", "-5", R), ("\\$42", "42", R), ("-\\$5", "-5", R),
    ("€3", "3", R), ("£1,000", "1000", R), ("¥500", "500", R), ("42 dollars", "42", R), ("42 cm", "42", R),
    ("42cm", "42", R), ("50%", "50", R), ("50\\%", "50", R), ("50 %", "0.5", W), ("42 km/h", "42", R),
    ("42 apples", "42", R), ("USD 42", "42", R), ("42°", "42", R), ("$1,234.50.", "1234.5", R), ("$ 42", "42", R),
    # the last of all
    ("2 + 2 = 4", "4", R), ("2 + 2 = 4", "2", W), ("5-3", "3", R), ("5-3", "-3", W), ("She has 3, then 5.", "5", R),
    ("x = -7", "-7", R), ("from 3 to 5", "5", R), ("He needs 12 eggs in 3 boxes", "3", R), ("10 - 12 = -2", "-2", R),
    ("It is 7 (see 2)", "2", R),
    # boxes
    ("\\boxed{42}", "42", R), ("so \\boxed{42} after 3 steps", "42", R), ("\\boxed{1} no, \\boxed{42}", "42", R),
    ("\\boxed{42} no, \\boxed{1}", "42", W), ("\\boxed{x = 42}", "42", R), ("\\boxed{\\frac{3}{4}}", "0.75", R),
    ("\\boxed{\\text{42 apples}}", "42", R), ("\\boxed{\\boxed{42}}", "42", R), ("$\\boxed{42}$.", "42", R),
    ("\\boxed{ 42 }", "42", R), ("\\boxed{}", "42", W), ("42 \\boxed{}", "42", W), ("\\boxed{\\$1,234}", "1234", R),
    ("\\boxed{-42}", "-42", R), ("\\boxed{42\\%}", "42", R), ("\\fbox{42} 3", "42", R),
    ("\\boxed{6 \\cdot 7 = 42}", "42", R),
    ("\\boxed{42", "42", R), ("\\boxed{\\left(42\\right)}", "42", R), ("\\boxed{42} #### 7", "42", R),
    # marks
    ("#### 42", "42", R), ("####42", "42", R), ("1 + 1 = 2\n#### 2", "2", R), ("#### 42 apples in 3 bags", "42", R),
    ("#### 1\n#### 42", "42", R), ("#### 42\n#### 1", "42", W), ("#### 42\nIn 3 steps.", "42", R),
    ("####\n42", "42", R),
    ("#### $1,234.00", "1234", R), ("####", "42", W), ("42 ####", "42", W), ("#### 6 * 7 = 42", "42", R),
    ("#### -3 and 4", "-3", R), ("#### 3/4", "0.75", R), ("42\n#### none", "42", W), ("### 42", "42", R),
    # phrases
    ("The answer is 42.", "42", R), ("The answer is 42. I checked it 3 times.", "42", R),
    ("The final answer is: 42. That took 7 steps.", "42", R), ("Answer: 42 (in 3 steps)", "42", R),
    ("**Answer:** 42\nThere were 9 of them.", "42", R), ("The answer is $42, since 40 + 2.", "42", R),
    ("The answer is 5 + 3 = 8 apples.", "8", R), ("The answer is 41. No, the answer is 42. I am 100% sure.", "42", R),
    ("The answer is 41. No, the answer is 42.", "41", W), ("My answer is unclear.\n42", "42", R),
    ("answer = 42 of 50", "42", R), ("The answers are 42 and 7", "42", R), ("The answer is 3.5 m. Not 4.", "3.5", R),
    ("The answer is \\frac{1}{2} of it, 7 parts", "0.5", R), ("ANSWER: 42 out of 100", "42", R),
    ("The answer is -42 degrees at 5 o'clock", "-42", R), ("The answer is 1,234 in 2 years", "1234", R),
    # tags
    ("<answer>42</answer>", "42", R), ("<answer> 42 </answer> since 3", "42", R),
    ("<think>1</think><answer>42</answer>", "42", R),
    ("<answer>1</answer><answer>42</answer>", "42", R), ("<answer>\\boxed{42}</answer> 7", "42", R),
    ("<answer>6 * 7 = 42</answer>", "42", R), ("<answer></answer> 42", "42", W),
    ("<answer>#### 42</answer> 3", "42", R),
    ("\\boxed{7} <answer>42</answer>", "42", R), ("<answer>The answer is 42 of 50.</answer>", "42", R),
]  # fmt: skip

MATH = [
    # numbers
    ("\\boxed{42}", "42", R), ("\\boxed{42.0}", "42", R), ("\\boxed{-42}", "42", W), ("\\boxed{−3}", "-3", R),
    ("\\boxed{1,234}", "1234", R), ("\\boxed{1{,}234}", "1234", R), ("\\boxed{-0}", "0", R), ("\\boxed{007}", "7", R),
    ("\\boxed{0.5}", "\\frac{1}{2}", R), ("\\boxed{\\frac{1}{2}}", "0.5", R),
    ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", R),
    ("\\boxed{1/2}", "\\frac{1}{2}", R), ("\\boxed{\\dfrac{7}{3}}", "\\frac{7}{3}", R),
    ("\\boxed{\\frac73}", "\\frac{7}{3}", R),
    ("\\boxed{-\\frac{1}{2}}", "\\frac{-1}{2}", R), ("\\boxed{1\\frac{1}{2}}", "1.5", R),
    ("\\boxed{0.333}", "\\frac{1}{3}", W),
    ("\\boxed{\\frac{1}{3}}", "0.33", W), ("\\boxed{3.14}", "\\pi", W), ("\\boxed{10^{10}}", "10000000000", R),
    ("\\boxed{2^{10}}", "1024", R), ("\\boxed{5!}", "120", R), ("\\boxed{6}", "3!", R), ("\\boxed{7}", "3!", W),
    ("\\boxed{\\$12.50}", "12.5", R), ("\\boxed{12.50}", "\\$12.50", R), ("\\boxed{50\\%}", "50", R),
    ("\\boxed{50\\%}", "50\\%", R),
    ("\\boxed{90^\\circ}", "90", R), ("\\boxed{5 \\text{ cm}}", "5", R), ("\\boxed{5\\text{ cm}^2}", "5", R),
    ("\\boxed{4.5\\times 10^{3}}", "4500", R), ("\\boxed{}", "42", W), ("\\boxed{ 42 }", "42", R),
    ("\\boxed{42}.", "42", R),
    ("\\boxed{43}", "42", W), ("\\boxed{4}", "42", W), ("\\boxed{100}", "10", W), ("\\boxed{\\sqrt{16}}", "4", R),
    # expressions
    ("\\boxed{x^2+2x+1}", "(x+1)^2", R), ("\\boxed{(x+1)^2}", "x^2+2x+1", R), ("\\boxed{x^2+2x}", "(x+1)^2", W),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", R), ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", R), ("\\boxed{\\sqrt{2}}", "2", W),
    ("\\boxed{\\frac{\\sqrt{3}}{3}}", "\\frac{1}{\\sqrt{3}}", R), ("\\boxed{2\\pi}", "2 \\pi", R),
    ("\\boxed{\\pi}", "2\\pi", W),
    ("\\boxed{a+b}", "b+a", R), ("\\boxed{a-b}", "b-a", W), ("\\boxed{2x}", "x\\cdot 2", R), ("\\boxed{x = 5}", "5", R),
    ("\\boxed{5}", "x = 5", R), ("\\boxed{x=6}", "5", W), ("\\boxed{y = 2x + 1}", "2x+1", R),
    ("\\boxed{\\sin^2 x + \\cos^2 x}", "1", R),
    ("\\boxed{\\log_2 8}", "3", R), ("\\boxed{e^{\\ln 3}}", "3", R), ("\\boxed{\\frac{x}{y}}", "x/y", R),
    ("\\boxed{xy}", "yx", R),
    ("\\boxed{\\binom{5}{2}}", "10", R), ("\\boxed{|{-3}|}", "3", R), ("\\boxed{3\\sqrt[3]{2}}", "3 \\sqrt[3]{2}", R),
    # several values
    ("\\boxed{(1, 2)}", "(1,2)", R), ("\\boxed{(2, 1)}", "(1,2)", W), ("\\boxed{(1,2,3)}", "(1,2)", W),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", R), ("\\boxed{1, 2}", "1,2", R), ("\\boxed{2, 1}", "1, 2", R),
    ("\\boxed{1,3}", "1,2", W),
    ("\\boxed{[0, 1]}", "[0,1]", R), ("\\boxed{[0,1)}", "[0,1]", W), ("\\boxed{(-\\infty, 3]}", "(-\\infty,3]", R),
    ("\\boxed{\\left( \\frac{1}{2}, 3 \\right)}", "(0.5, 3)", R), ("\\boxed{(0,1)\\cup(2,3)}", "(0,1) \\cup (2,3)", R),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", R),
    ("\\boxed{\\begin{pmatrix}2\\\\1\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", W),
    # words
    ("\\boxed{\\text{Monday}}", "\\text{Monday}", R), ("\\boxed{Monday}", "\\text{Monday}", R),
    ("\\boxed{\\text{monday}}", "Monday", R),
    ("\\boxed{\\text{Tuesday}}", "\\text{Monday}", W), ("\\boxed{\\text{(A)}}", "\\text{(A)}", R),
    ("\\boxed{\\textbf{(A)}}", "\\text{(A)}", R),
    ("\\boxed{B}", "A", W), ("\\boxed{\\text{even}}", "\\text{odd}", W), ("\\boxed{\\mathrm{east}}", "\\text{east}", R),
    # where the answer stands
    ("\\boxed{1} and so \\boxed{42}", "42", R), ("\\boxed{42} and so \\boxed{1}", "42", W),
    ("\\boxed{\\boxed{42}}", "42", R),
    ("The answer is $\\boxed{42}$. I hope it is correct.", "42", R), ("The answer is 42.", "42", R),
    ("The answer is $\\frac{3}{4}$.", "0.75", R),
    ("**Answer:** 42", "42", R), ("Final answer: $x^2$.", "x^2", R), ("#### 42", "42", R),
    ("#### \\frac{1}{2}", "0.5", R),
    ("<answer>42</answer>", "42", R), ("<answer>\\frac{1}{2}</answer>", "0.5", R), ("42", "42", R), ("$42$", "42", R),
    ("Thus $x = 42$", "42", R), ("no idea", "42", W), ("", "42", W), ("The answer is 43. Not 42.", "42", W),
    ("\\boxed{42", "42", R), ("we get 41, then $42$", "42", R), ("so $6\\cdot 7 = 42$", "42", R),
    ("\\fbox{42}", "42", R),
    ("Answer: \\boxed{x+1}", "1+x", R), ("\\boxed{42}", "The steps ... #### 42", R),
    ("\\boxed{7}", "so we have $\\boxed{7}$.", R),
]  # fmt: skip

COUNTDOWN = [
    # 3 5 7 = 26
    *[(text, "3 5 7 = 26", R) for text in (
        "3*7+5", "7*3+5", "5+3*7", "5 + 7 * 3", "(3*7)+5", "((3)*(7))+(5)", "3*7+5 = 26", "26 = 3*7+5", "3×7+5",
        "3·7+5", "3 \\times 7 + 5",
        "3 \\cdot 7 + 5", "$3*7+5$", "\\boxed{3*7+5}", "\\boxed{3 \\times 7 + 5 = 26}", "<answer>3*7+5</answer>",
        "<answer> (3 * 7) + 5 </answer>",
        "<think>3*5=15</think><answer>7*3+5</answer>", "#### 3*7+5", "The answer is 3*7+5.",
        "Answer: 3 * 7 + 5 = 26", "I tried 3+5+7.\n3*7+5",
        "First 3*7=21, then\n5+3*7", "<answer>1</answer> <answer>3*7+5</answer>", "3*7 - -5", "-(-3*7)+5",
        "  3*7+5  ", "3*7+5.", "`3*7+5`",
        "[3*7]+5", "**3*7+5**", "\\left(3*7\\right)+5", "<answer>3*7+5 = 26</answer> I am sure", "5--3*7",
    )],
    *[(text, "3 5 7 = 26", W) for text in (
        "", "26", "21+5", "3*7", "3*7+5+0", "3*7+5*1", "3+5+7", "3*5+7", "3*7+5-5+5", "3*7+5=25", "3*7+5=26=26",
        "x+5", "3*7+y", "3**7+5", "37-5-6",
        "3*7+5; print(1)", "__import__('os')", "3*7+5 because it works", "eval('3*7+5')", "3.0*7+5", "3*7+05",
        "(3*7+5", "3*7+5)", "3*7++", "3 7 5",
        "3*7+5\nDone", "<answer>26</answer>", "<answer></answer>3*7+5", "\\boxed{26} 3*7+5", "3*7+5 = 27", "7//3+5",
        "3%7+5", "3*7|5", "1e1+3*7-5",
        "3*7+5 or 7*3+5", "(3*7)+5,", "3*7+5 26", "3*(7+5)", "-3*7+5", "lambda: 26", "[3*7+5 for x in range(3)]",
        "3*7+5#", "0x3*7+5", "3_0*7+5",
    )],
    # division, repeated numbers, negative and larger targets
    *[(text, "2 6 8 = 24", R) for text in ("6*8/2", "6/2*8", "8/2*6", "8*6/2=24", "6÷2×8", "6 \\div 2 \\times 8",
    "6*(8/2)", "(6/2)*8")],
    *[(text, "2 6 8 = 24", W) for text in ("2*6*8", "8/(2*6)", "6*8-24", "2/0*6*8", "24", "8*6/2/1", "8+6*2", "6/2+8")],
    *[(text, "4 4 10 = 36", R) for text in ("4*10-4", "10*4-4", "-4+4*10", "(10*4)-4=36")],
    *[(text, "4 4 10 = 36", W) for text in ("4*10-4-4", "40-4", "4*9", "10*4-4*1", "4+4+10*2+8", "4*10")],
    *[(text, "1 2 3 4 = 10", R) for text in ("1+2+3+4", "4+3+2+1", "(1+2)+(3+4)", "1*2*3+4", "10=1+2+3+4")],
    *[(text, "1 2 3 4 = 10", W) for text in ("1+2+3", "5+5", "1+2+3+4+0", "12-3+1", "1+2+3+4=11", "2+3+4+1+1-1")],
    *[(text, "3 7 = -4", R) for text in ("3-7", "3 - 7 = -4", "3 − 7", "-7+3", "-(7-3)")],
    *[(text, "3 7 = -4", W) for text in ("7-3", "3-7-0", "-4", "3+7")],
    *[(text, "3 4 8 = 6", R) for text in ("8*3/4", "8/4*3", "3/4*8", "3/(4/8)")],  # 3/4 is kept as a fraction
    *[(text, "3 4 8 = 6", W) for text in ("8/4+3", "3*4-8+2", "8//4*3", "6")],
]  # fmt: skip

FORMS = {
    "boxed": [
        *[(text, R) for text in ("\\boxed{4}", "so \\boxed{\\frac{1}{2}}.", "\\boxed{x} and more", "\\boxed {4}",
        "\\fbox{4}", "\\boxed{\\{1\\}}",
            "\\boxed{}\\boxed{4}", "a\n\\boxed{4}\nb", "\\boxed{\\boxed{4}}", "\\boxed{\\text{yes}}")],
        *[(text, W) for text in ("", "4", "boxed{4}", "\\boxed{}", "\\boxed{ }", "\\boxed{4", "\\boxed 4",
        "\\box{4}", "\\boxed{\\frac{1}{2}", "\\boxed{4}\\boxed{}",
            "\\boxed(4)", "{4}")],
    ],
    "marked": [
        *[(text, R) for text in ("#### 4", "a\n#### 4", "a\nb\n####4", "a\n#### 4\n", "#### four",
        "#### \\frac{1}{2}", "a\n\n#### $4")],
        *[(text, W) for text in ("", "4", "####", "a\n####", "a #### 4", "#### 4\nmore", "### 4", "#### 4\n#### 5",
        "#### 4 #### 5", "a ####4", "#### \n")],
    ],
    "think_answer": [
        *[(text, R) for text in ("<think>a</think><answer>b</answer>", "<think>a</think>\n<answer>b</answer>",
        " <think>\na\n</think>\n\n<answer>\nb\n</answer>\n",
            "<think>1 < 2</think><answer>\\boxed{4}</answer>")],
        *[(text, W) for text in ("", "b", "<answer>b</answer>", "<think>a</think>", "<think>a</think>b",
        "<think></think><answer>b</answer>",
            "<think>a</think><answer> </answer>", "x<think>a</think><answer>b</answer>",
            "<think>a</think>x<answer>b</answer>", "<think>a</think><answer>b</answer>x",
            "<answer>b</answer><think>a</think>", "<think>a<answer>b</answer></think>",
            "<think>a</think><answer>b</answer><answer>c</answer>",
            "<think>a</think><answer>b", "<Think>a</Think><answer>b</answer>",
            "<think>a</think><think>a</think><answer>b</answer>")],
    ],
}  # fmt: skip

"""Responses, answers and verdicts, written by hand from docs/tasks.md by an examiner of the graders."""

R, W = True, False

FORMS = {
    "boxed": [
        *[(text, R) for text in (
            r"\boxed{5}", r"\boxed{6}", r"So $\boxed{5}$.", r"\[\boxed{5}\]", r"\boxed{\frac{1}{2}}",
            r"\boxed{I don't know}", r"\boxed{\boxed{5}}", r"\boxed{1} or \boxed{2}", r"\boxed{} or \boxed{2}",
            r"<think>hm</think> \boxed{5}", r"<answer>\boxed{5}</answer>", r"**\boxed{5}**", r"\\boxed{5}",
            r"\boxed{5}}", r"\boxed{5}{6}", r"\boxed {5}", "\\boxed\n{5}", r"\boxed{x \in \{1, 2\}}", r"\boxed{\{1,2}",
            r"\boxed{...}", r"\boxed{$5$}", r"put it into \boxed{...}: 5", r"\boxed{5} \boxed{6} \boxed{7}",
            r"text \boxed{a b c} text", r"{\boxed{5}}", r"\boxed{{5}}", "\\boxed{5}\n\nI hope this helps.",
        )],
        *[(text, W) for text in (
            r"\boxed{5", "boxed{5}", r"\box{5}", r"\boxed 5", r"\boxed(5)", r"\boxed[5]", "5", "The answer is 5.",
            r"\boxed{1} or \boxed{}", r"\boxed{1} or \boxed{2", r"\Boxed{5}", r"\BOXED{5}",
            r"The answer in \boxed{} is 5", r"\boxed{{}}", r"\boxed{\text{}}", r"\boxed{\ }", "#### 5",
            "<answer>5</answer>", "\boxed{5}",
        )],
    ],
    "marked": [
        *[(text, R) for text in (
            "#### 5", "#### 6", "text\n#### 5", "text\n\n#### 5\n", "text\n#### 5\n\n", "text\n#### 5  ",
            "text\n####5", "text\n#### $5", "text\n#### 1,234", "text\n#### -5", "text\n#### five",
            "text\n#### The answer is 5.", "text\n#### **5**", "text\n#### \\boxed{5}", "text\n####  5",
            "text\n####\t5", "text\r\n#### 5", "text\n#### 5\r\n", "<think>a</think>\n#### 5", "\n#### 5",
            "\n\n\n#### 5", "text\n#### 5 dollars", "text\n#### 5\n   \n",
            "## Step 1\n9 * 2 = 18\n### Step 2\nok\n#### 18", "#### ?", "####\u00a05", "text\n####: 5",
            "text\n#### : 5", "text\n#### 5</s>",
        )],
        *[(text, W) for text in (
            "text #### 5", "text\n #### 5", "text\n### 5", "text\n##### 5", "text\n####", "text\n#### ",
            "#### 5\nmore", "#### 5\n\nmore", "#### 4\ntext\n#### 5", "see #### 4\n#### 5", "5", "text\n5 ####",
            "text\n#### 5 ####", "**#### 5**", "text\n####\n5", "<think>#### 4</think>\n#### 5", "# # # # 5",
            r"\#### 5", "text\n>#### 5", "text\n```\n#### 5\n```", "#### Step 1\n9 * 2\n#### 18", "####### 5\n#### 5",
            "The answer is 5.", r"\boxed{5}", "<answer>5</answer>", "text\u2028#### 5",
        )],
    ],
    "think_answer": [
        *[(text, R) for text in (
            "<think>a</think><answer>5</answer>", "<think>a</think><answer>6</answer>",
            "<think>a</think>\n<answer>5</answer>", "<think>\na\n</think>\n\n<answer>\n5\n</answer>",
            "<think>a</think> <answer>5</answer>\n", "\n<think>a</think><answer>5</answer>",
            " <think>a</think><answer>5</answer> ", r"<think>a</think><answer>\boxed{5}</answer>",
            "<think>1 < 2 and 3 > 2</think><answer>5</answer>", "<think>a <b>bold</b></think><answer>5</answer>",
            "<think>a</think>\t<answer>5</answer>",
            "<think>line\n\nline\n\nline</think>\n\n<answer>line\nline</answer>",
            "<think>a</think>\n\n\n\n<answer>5</answer>\n\n\n",
        )],
        *[(text, W) for text in (
            "<think></think><answer>5</answer>", "<think> </think><answer>5</answer>",
            "<think>\n\n</think>\n<answer>5</answer>", "<answer>5</answer>", "<think>a</think>5", "5",
            "a</think><answer>5</answer>", "<think>a<answer>5</answer>", "<think>a</think><answer>5",
            "<think>a</think>5</answer>", "Sure: <think>a</think><answer>5</answer>",
            "<think>a</think><answer>5</answer> Done.", "<think>a</think> so <answer>5</answer>",
            "<answer>5</answer><think>a</think>", "<think>a</think><think>b</think><answer>5</answer>",
            "<think>a</think><answer>5</answer><answer>6</answer>", "<think>a <think> b</think><answer>5</answer>",
            "<think>a</think><answer>5 <answer> </answer>", "<think>a </think> b</think><answer>5</answer>",
            "<think>a</think><answer>5</answer></answer>", "<think>a <answer>4</answer> b</think><answer>5</answer>",
            "<think>a</think><answer><think>b</think>5</answer>", "<think>a<answer>5</answer></think>",
            "<Think>a</Think><Answer>5</Answer>", "<THINK>a</THINK><ANSWER>5</ANSWER>",
            "<thinking>a</thinking><answer>5</answer>", "< think >a</ think ><answer>5</answer>",
            "[think]a[/think][answer]5[/answer]", "<think>a</think>.<answer>5</answer>",
            "```<think>a</think><answer>5</answer>```", "<think>a</think><answer>5</answer><",
            "<think>a<think></think><answer>5</answer>", "<think/>a<answer>5</answer>",
            "<think>a</think><answer>5<answer>", "<think>a<think><answer>5<answer>",
            "<think>a</think><answer>5</answer><think>b</think>", "<answer><think>a</think>5</answer>",
        )],
    ],
}  # fmt: skip

EXACT = [
    ("5", "5", R), (" 5", "5", R), ("5 ", "5", R), ("5\n", "5", R), ("\n\n5\n\n", "5", R), ("\t5\t", "5", R),
    ("5.", "5", W), ("5.0", "5", W), ("05", "5", W), ("+5", "5", W), ("-5", "5", W), ("6", "5", W), ("55", "5", W),
    ("5 5", "5", W), ("", "5", W), (" ", "5", W), ("five", "5", W), ("The answer is 5", "5", W),
    ("5 is the answer", "5", W), (r"\boxed{5}", "5", W), ("<answer>5</answer>", "5", W), ("#### 5", "5", W),
    ("yes.", "yes", W), ("no", "yes", W), ("yes no", "yes", W), ("blue bird", "blue bird", R),
    ("blue  bird", "blue bird", W), ("bluebird", "blue bird", W), ("blue\nbird", "blue bird", W),
    (" blue bird \n", "blue bird", R), ("blue bird", " blue bird ", R), ("5", " 5\n", R), ("café", "café", R),
    ("café", "café", W), ("cafe", "café", W), ("日本", "日本", R), ("日本。", "日本", W), ("a,b", "a, b", W),
    ("a, b", "a, b", R), ("b, a", "a, b", W), ("−5", "-5", W), ("'5'", "5", W), ("\"5\"", "5", W), ("`5`", "5", W),
    ("**5**", "5", W), ("line1\nline2", "line1\nline2", R), ("line1\nline2\n", "line1\nline2", R),
    ("line1\n line2", "line1\nline2", W), ("-0", "0", W), ("0.5", "0.50", W), ("x+1", "1+x", W), ("\u00a05", "5", R),
    ("  ", "", R), ("a", "", W), ("<think>5</think>5", "5", W),
]  # fmt: skip

VERBATIM = [
    ("5", "5", R), (" 5", "5", W), ("5 ", "5", W), ("5\n", "5", W), ("\n5", "5", W), ("5.", "5", W), ("5.0", "5", W),
    ("05", "5", W), ("6", "5", W), ("55", "5", W), ("", "5", W), ("five", "5", W), ("yes ", "yes", W),
    ("yes", "yes ", W), ("yes ", "yes ", R), (" yes", " yes", R), ("yes", " yes", W), ("a\nb\n", "a\nb", W),
    ("a\nb", "a\nb\n", W), ("a\r\nb", "a\nb", W), ("café", "café", R), ("café", "café", W), ("日本", "日本", R),
    ("日 本", "日本", W), ("−5", "-5", W), ("-5", "-5", R), ("5", "-5", W), ("+5", "5", W),
    ("12345678901234567890", "12345678901234567890", R), ("12345678901234567891", "12345678901234567890", W),
    ("1,000", "1000", W), ("1000", "1000", R), (r"\boxed{5}", "5", W), (r"\boxed{5}", r"\boxed{5}", R),
    ("<answer>5</answer>", "5", W), ("#### 5", "5", W), ("#### 5", "#### 5", R), ("The answer is 5", "5", W),
    ("5 is it", "5", W), ("00", "0", W), ("-0", "0", W), ("TRUE", "True", W), (" ", " ", R), ("½", "1/2", W),
    ("1/2", "1/2", R), ("2/4", "1/2", W), ("👍", "👍", R), ("👍🏽", "👍", W),
]  # fmt: skip

"""Hundreds of malformed inputs: each is refused in one line that names file and line, and leaves nothing behind."""

import json
import random
import re
from pathlib import Path

import pytest

from solera.cli import main
from solera.errors import SoleraError
from tests.tasks.parts import Listed, grade_all, write_rewards

GOOD = b'{"prompt": "1+1=", "answer": "2"}'
CHAT = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "2"}
NO_PROMPT = [None, True, False, 0, 1, -1.5, "", [], {}, {"role": "user", "content": "x"}]
NO_MESSAGE = [None, 1, "text", [], {}, {"role": "user"}, {"content": "x"}]
NO_ROLE = [None, 1, "", "User", "human", "bot", [], {}, "user ", True]
NO_CONTENT = [None, 1, [], {}, True, 1.5, ["text"], [{"type": "text", "text": "x"}]]
NO_ANSWER = [None, True, [], {}, ["2"], {"a": 2}]
NO_NUMBER = ["", "few", "-", ".", "1/0", "9" * 500, "####", "\\boxed{}"]
CONSTANTS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400"]


def broken_bytes() -> list[bytes]:
    """Lines that are not JSON: cut off anywhere, or with a byte put in or taken out where it cannot be."""
    cut = [GOOD[:n] for n in range(1, len(GOOD))]
    rng = random.Random(0)
    for junk in (b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\t", b"\x1b"):
        cut += [GOOD[:n] + junk + GOOD[n:] for n in rng.sample(range(3, 8), 5)]
    cut += [GOOD.replace(mark, b"", 1) for mark in (b"{", b"}", b":", b",", b'"')]
    cut += [GOOD + GOOD, GOOD + b",", b"[" + GOOD, GOOD.replace(b'"', b"'"), b"prompt: 1", b"<xml/>", b"{prompt: 1}"]
    cut += [b'{"prompt": undefined}', b"\xef\xbb\xbf", b'{"prompt": "\\x"}', b'{"prompt": "\\u12"}', b'{"prompt": 01}']
    return [*cut, b"#", b"//", b'{"prompt": "a",}']


def broken_values() -> list[bytes]:
    """Lines that are JSON but not a row."""
    rows = [*({"prompt": value, "answer": "2"} for value in NO_PROMPT)]
    rows += [
        {name: "1+1=", "answer": "2"} for name in ("", "Prompt", "prompts", "text", "question", " prompt", "prompt ")
    ]
    rows += [
        {**CHAT, "prompt": [*CHAT["prompt"][:n], value, *CHAT["prompt"][n:]]} for value in NO_MESSAGE for n in (0, 1)
    ]
    rows += [{**CHAT, "prompt": [{"role": role, "content": "x"}]} for role in (*NO_ROLE, "system", "assistant")]
    rows += [{**CHAT, "prompt": [{"role": "user", "content": content}]} for content in NO_CONTENT]
    rows += [{"prompt": "1+1=", "answer": answer} for answer in NO_ANSWER] + [{"prompt": "1+1="}]
    rows += [{"prompt": text, "answer": "2"} for text in ("\ud800", "a\udfffb")] + [
        {"prompt": "p", "answer": "2", "\ud800": 1}
    ]
    lines = [json.dumps(row).encode() for row in rows]
    lines += [json.dumps(value).encode() for value in (None, True, 0, 1.5, "text", [], [{"prompt": "a"}], ["prompt"])]
    for constant in CONSTANTS:
        lines += [b'{"prompt": %s}' % constant, b'{"prompt": "p", "answer": %s}' % constant, constant]
        lines += [b'{"prompt": "p", "answer": "2", "more": {"deep": [1, %s]}}' % constant]
    lines += [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "answer": "2", "x": {"y": 1, "y": 2}}',
        b"[" * 100_000,
    ]
    return [*lines, b'{"prompt": "p", "answer": "2", "x": ' + b"9" * 5000 + b"}"]


LINES = [(line, place) for line in dict.fromkeys(broken_bytes() + broken_values()) for place in (1, 3)]
OUTPUTS = ["'text'", "'1'", "b'1'", "[]", "[1]", "(1,)", "{}", "{1}", "1j", "float('nan')", "float('inf')",
           "10**400", "object()", "lambda: 1", "print", "int", "...", "range(1)", "Exception('x')", "'a\\nb'",
           "'x' * 9999", "-float('inf')",
           "__import__('decimal').Decimal(1)", "__import__('numpy').array([1.0])", "__import__('numpy').nan",
           "__import__('torch').zeros(2)", "__import__('numpy').array('x')", "iter([1])",
           "type('Odd', (), {'__repr__': 0})()",
           "1 / 0", "{}['missing']", "[].pop()", "undefined", "int('x')", "next(iter([]))", "exit(3)", "'x' + 1",
           "(_ for _ in ()).throw(ValueError('two\\nlines'))", "open('/nowhere/at/all')",
           "row['nothing']", "rollout.nothing"]  # fmt: skip


def test_there_are_at_least_four_hundred():
    assert len(LINES) + 3 * len(OUTPUTS) >= 400


def refused(capfd, toml: str) -> str:
    """The one line that the command says of a run from a file, beside which nothing may appear."""
    Path("run.toml").write_text(toml)
    before = sorted(Path().rglob("*"))
    assert main(["train", "run.toml"]) == 2
    assert sorted(Path().rglob("*")) == before
    said = capfd.readouterr()
    assert not said.out
    assert said.err.startswith("solera: ")
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.err
    return said.err


def test_a_malformed_line_is_named_and_no_folder_is_made(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for number, (line, place) in enumerate(LINES):
        name = f"data{number}.jsonl"
        (tmp_path / name).write_bytes(b"\n".join([GOOD] * (place - 1) + [line] + [GOOD]))
        said = refused(capfd, f'[task]\nname = "jsonl"\npath = "{name}"\nheld_out_share = 0.5')
        assert re.match(rf"solera: {name}:{place}: \w", said), (line[:100], said)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("answer", NO_NUMBER)
def test_an_answer_without_a_number_is_named(tmp_path, monkeypatch, capfd, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_bytes(GOOD + b"\n" + json.dumps({"prompt": "p", "answer": answer}).encode())
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "x", "answer": 1}')
    task = 'name = "jsonl"\npath = "d.jsonl"\nheld_out_path = "t.jsonl"'
    said = refused(capfd, f'[task]\n{task}\n[reward]\nfunctions = ["number"]')
    assert "d.jsonl:2: field 'answer'" in said


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\n\t\n", b"\r\n"])
def test_an_empty_file_is_said(tmp_path, monkeypatch, capfd, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_bytes(content)
    assert "d.jsonl:1: the file is empty" in refused(capfd, '[task]\nname = "jsonl"\npath = "d.jsonl"')
    assert "nowhere: cannot be read: No such file" in refused(capfd, '[task]\nname = "jsonl"\npath = "nowhere"')
    assert "the folder has neither train.jsonl nor test.jsonl" in refused(capfd, '[task]\nname = "jsonl"\npath = "."')


@pytest.mark.parametrize("kind", ["def f(rollout, row)", "async def f(rollout, row)", "def f(completions, **columns)"])
def test_a_malformed_reward_names_function_and_row(tmp_path, kind):
    problems = Listed({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "3"})
    for output in OUTPUTS:
        if "completions" in kind:
            body = f"    row, rollout = {{}}, None\n    return [1, {output}, None]"
        else:
            body = f"    return {output} if row['answer'] == '2' else 1"
        path = write_rewards(tmp_path, f"{kind}:\n{body}")
        with pytest.raises(SoleraError) as refusal:
            grade_all(problems, ["x", "y", "z"], functions=(f"{path}:f",), timeout=5)
        said = str(refusal.value)
        assert "\n" not in said, said
        assert len(said) < 600
        assert re.match(r"data\.jsonl:[12]: reward \S+rewards\.py:f (returned|raised) ", said), (output, said)
        graded = grade_all(problems, ["x", "y", "z"], functions=("exact", f"{path}:f"), timeout=5, errors="missing")
        assert len(graded[1]) == 1  # what `exact` gave stays

"""Problems from a file: an order for each epoch, sides that share no prompt, columns as they were written."""

import json
from collections import Counter

import pytest

from solera.config import Config, TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.objectives.table import resolve_config
from solera.tasks.jsonl import Jsonl, read_object
from tests.tasks.parts import Letters

LETTERS = Letters()


@pytest.fixture
def problems(tmp_path):
    def make(rows, seed=0, longest=None, graders=frozenset(), held_out=None, codec=LETTERS, **task):
        write(tmp_path / "data.jsonl", rows)
        if held_out is not None:
            write(tmp_path / "test.jsonl", held_out)
            task["held_out_path"] = str(tmp_path / "test.jsonl")
        config = resolve_task(TaskConfig("jsonl", path=str(tmp_path / "data.jsonl"), **task))
        return Jsonl(config, codec, seed, longest, graders)

    return make


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"problem {i}", "answer": i} for i in range(count)]


def test_every_epoch_shows_every_row_once_in_an_order_of_its_own(problems):
    task = problems(numbered(40), held_out=numbered(2), seed=3)
    epochs = [[task.prompt(38 * e + i).data["answer"] for i in range(38)] for e in range(3)]
    assert all(sorted(epoch) == list(range(2, 40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])
    again = problems(numbered(40), held_out=numbered(2), seed=3)
    assert [again.prompt(i) for i in (90, 5, 41)] == [task.prompt(i) for i in (90, 5, 41)]
    other = problems(numbered(40), held_out=numbered(2), seed=4)
    assert [other.prompt(i).data["answer"] for i in range(38)] != epochs[0]


def test_a_row_keeps_its_columns_and_its_prompt_is_encoded_as_it_is(problems):
    row = {"question": " 1+1=\n", "answer": "2", "tags": ["a", {"b": None}], "ü": 1.5}
    task = problems([row], prompt="question", held_out=[{"question": "x"}])
    prompt = task.prompt(0)
    assert prompt.data == row
    assert prompt.token_ids == tuple(map(ord, " 1+1=\n"))
    assert task.columns == {"question", "answer", "tags", "ü"}
    assert task.place(prompt).endswith("data.jsonl:1")


def test_equal_rows_share_a_key_and_others_do_not(problems):
    rows = [
        {"prompt": "p", "a": 1, "b": 2},
        {"b": 2, "a": 1, "prompt": "p"},
        {"prompt": "p", "a": 2, "b": 1},
        {"prompt": "p"},
    ]
    task = problems(rows, held_out=[{"prompt": "x"}])
    keys = Counter(task.prompt(i).key for i in range(4))
    assert sorted(keys.values()) == [1, 1, 2]


def test_a_share_of_the_prompts_is_held_out_whatever_else_their_rows_say(problems):
    rows = [{"prompt": f"p{i % 500}", "answer": i} for i in range(2000)]
    task = problems(rows, held_out_share=0.2)
    held_out = task.held_out(10_000)
    training = {task.prompt(i).data["prompt"] for i in range(2000)}
    tested = {prompt.data["prompt"] for prompt in held_out}
    assert not training & tested
    assert training | tested == {f"p{i}" for i in range(500)}
    assert 60 < len(tested) < 140  # 100 ± 4.5 standard deviations of a binomial
    assert len(held_out) == 4 * len(tested)
    longer = problems([{"prompt": "new"}, *reversed(rows)], held_out_share=0.2, seed=9)
    assert {p.data["prompt"] for p in longer.held_out(10_000)} - {
        "new"
    } == tested  # not moved by lines added or shuffled
    assert longer.held_out(7) == longer.held_out(10_000)[:7]


def test_prompts_of_a_held_out_file_are_left_out_of_training(problems):
    task = problems(numbered(10), held_out=[{"prompt": "problem 3", "answer": "another"}, {"prompt": "new"}])
    assert {task.prompt(i).data["answer"] for i in range(9)} == set(range(10)) - {3}
    assert {prompt.data["prompt"] for prompt in task.held_out(5)} == {"problem 3", "new"}


def test_nothing_left_on_a_side_is_said(problems):
    with pytest.raises(
        SoleraError, match=r"task.held_out_share = 1e-09 holds out none of its 1 different prompt: raise it, or give"
    ):
        problems(numbered(1), held_out_share=1e-9)
    with pytest.raises(SoleraError, match=r"nothing is left to train on: all of its 3 rows .*: add other rows$"):
        problems(numbered(3), held_out=numbered(5))
    with pytest.raises(SoleraError, match=r"2 rows .* lower task\.held_out_share = 0\.9999999, or add rows$"):
        problems(numbered(2), held_out_share=0.9999999)


def test_a_number_of_thousands_of_digits_is_told_to_whoever_wrote_it():
    with pytest.raises(SoleraError, match=r"^data:7: a whole number has more than 4,300 digits: write it as text"):
        read_object(b'{"prompt": "a", "answer": %s}' % (b"9" * 5000), "data:7")
    with pytest.raises(SoleraError, match=r"^data:7: field 'a' appears twice$"):
        read_object(b'{"a": 1, "a": 2}', "data:7")


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_mistakes(problems, tmp_path):
    task = problems(numbered(1), held_out=[{"prompt": "x"}])
    (tmp_path / "odd.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b\xe2\x80\xa8c"}')
    config = TaskConfig("jsonl", path=str(tmp_path / "odd.jsonl"), held_out_path=str(tmp_path / "test.jsonl"))
    task = Jsonl(resolve_task(config), Letters(), 0)
    assert {task.prompt(i).data["prompt"] for i in range(2)} == {"a", "b\u2028c"}
    assert {task.place(task.prompt(i))[-2:] for i in range(2)} == {":1", ":4"}


def test_a_file_that_changed_is_read_again(problems):
    assert problems(numbered(3), held_out=[{"prompt": "x"}]).prompt(0).data["answer"] in range(3)
    assert problems([{"prompt": "other"}], held_out=[{"prompt": "x"}]).prompt(0).data == {"prompt": "other"}


def test_a_prompt_that_leaves_no_room_is_refused(problems):
    with pytest.raises(SoleraError, match=r"data.jsonl:2: field 'prompt' has 9 tokens; .* room for 4: shorten it"):
        problems([{"prompt": "four"}, {"prompt": "nine char"}], held_out=[{"prompt": "x"}], longest=4)


def test_texts_and_messages_of_one_file_keep_their_tokens(problems):
    """They are encoded in two batches: the tokenizer adds tokens to text, but not to what a chat template wrote."""

    class Adding(Letters):
        chats = True

        def encode_each(self, texts, whole):
            return [(ord("^"), *self.encode(text)) if whole else self.encode(text) for text in texts]

    def message(text):
        return [{"role": "user", "content": text}]

    rows = [{"prompt": prompt, "n": n} for n, prompt in enumerate(["a", message("b"), "c", message("d"), "e"])]
    wanted = ["^a", "<user>b<assistant>", "^c", "<user>d<assistant>", "^e"]
    task = problems(rows, held_out=[{"prompt": message("x")}], codec=Adding())
    for index in range(5):
        prompt = task.prompt(index)
        assert "".join(map(chr, prompt.token_ids)) == wanted[prompt.data["n"]]
    assert "".join(map(chr, task.held_out(1)[0].token_ids)) == "<user>x<assistant>"


def test_the_row_that_a_chat_template_refuses_is_named(problems):
    class Strict(Letters):
        def chat_text(self, messages):
            if len(messages) > 1:
                raise SoleraError("is refused by the model's chat template: one message only")
            return super().chat_text(messages)

    rows = [{"prompt": [{"role": "user", "content": "a"}] * length} for length in (1, 1, 2, 1)]
    with pytest.raises(SoleraError, match=r"data.jsonl:3: field 'prompt' is refused by the model's chat template: one"):
        problems(rows, held_out=[{"prompt": "x"}], codec=Strict())


def test_answers_are_checked_where_a_grader_needs_them(problems):
    rows = [{"prompt": "a", "solution": "about 5"}, {"prompt": "b", "solution": "none"}]
    sides = {"held_out": [{"prompt": "x", "solution": 3}], "answer": "solution"}
    problems(rows, graders=frozenset(["exact"]), **sides)
    with pytest.raises(SoleraError, match=r"data.jsonl:2: field 'solution' is 'none', which holds no number"):
        problems(rows, graders=frozenset(["number"]), **sides)
    with pytest.raises(SoleraError, match=r"test.jsonl:1: field 'answer' is missing, but the grader exact needs"):
        problems([{"prompt": "a", "answer": 1}], graders=frozenset(["exact"]), held_out=[{"prompt": "x"}])


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"name": "jsonl"}, "task.path is unset; jsonl needs a file"),
        ({"name": "jsonl", "path": "x", "level": 2}, "task.level is not used by jsonl: remove it"),
        ({"name": "arithmetic", "path": "x"}, "task.path is not used by arithmetic: remove it"),
        ({"name": "arithmetic", "held_out_share": 0.1}, "task.held_out_share is not used by arithmetic"),
        ({"name": "jsonl", "path": "x", "held_out_path": "y", "held_out_share": 0.1}, "choose one"),
        ({"name": "jsonl", "path": "x", "held_out_share": 1.0}, "at least 0 and below 1"),
        ({"name": "jsnl"}, "did you mean jsonl?"),
        ({"name": "sums.jsonl"}, 'for the problems of a file: task.name = "jsonl", task.path = "sums.jsonl"$'),
    ],
)
def test_fields_of_another_task_are_refused(task, says):
    with pytest.raises(SoleraError, match=says):
        resolve_config(Config(task=TaskConfig(**task)))


def test_unset_fields_take_the_tasks_own_values_once():
    resolved = resolve_task(TaskConfig("jsonl", path="x"))
    assert (resolved.prompt, resolved.answer, resolved.held_out_share, resolved.level) == (
        "prompt",
        "answer",
        0.1,
        None,
    )
    assert resolve_task(resolved) == resolved
    tested = resolve_task(TaskConfig("jsonl", path="x", held_out_path="y"))
    assert tested.held_out_share is None
    assert resolve_task(tested) == tested
    assert resolve_task(TaskConfig()).level == 2

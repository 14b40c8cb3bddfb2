"""Own data and rewards from end to end: the command, the example, a model with a chat template and no pad token."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from solera.cli import main
from solera.config import TaskConfig, parse, resolve_task
from solera.errors import SoleraError
from solera.models import loading
from solera.run.parts import resolved
from solera.run.running import train
from solera.run.task import build_task
from solera.tasks.jsonl import read_split
from tests.command import ROOT, solera

EXAMPLE = ROOT / "examples" / "own_reward"

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CHARACTERS = "0123456789+=:aust "


def small(name: str, steps: int = 3) -> list[str]:
    """Options of a short run."""
    size = f"--run.steps {steps} --collect.prompts 4 --evaluate.problems 10 --checkpoint.every 2"
    return f"{size} --run.name {name} --run.device cpu --report.tensorboard false --report.page false".split()


@pytest.fixture
def example(tmp_path) -> Path:
    ignored = shutil.ignore_patterns("runs", "__pycache__")
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example", ignore=ignored))


def test_the_example_runs_as_written(example):
    done = solera("train", "run.toml", *small("x"), cwd=example)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\nheld-out reward 0\.\d+ before, 0\.\d+ after\n", done.stdout)
    rows = [json.loads(line) for line in (example / "runs" / "x" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/exact", "reward/digits", "reward/carried"} <= rows[0].keys()
    assert 0 < rows[0]["reward/digits"] <= 0.3
    assert 0 <= rows[0]["reward/carried"] <= 0.2
    assert (
        'functions = ["exact", "rewards.py:digits", "rewards.py:carried"]'
        in (example / "runs/x/config.toml").read_text()
    )


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (0.0, "easier problems, or does the reward never accept an answer?"),
        (1.0, "harder problems, or a reward that distinguishes the answers?"),
    ],
)
def test_a_run_that_learned_nothing_says_why_it_may_be(example, monkeypatch, capfd, value, advice):
    monkeypatch.chdir(example)
    (example / "rewards.py").write_text(f"def constant(rollout, row):\n    return {value}\n")
    options = ["--reward.functions", "rewards.py:constant", "--reward.weights", "1"]
    assert main(["train", "run.toml", *small("x"), *options]) == 0
    note = f"note: nothing was learned: no batch had a group with different rewards ({advice})\n"
    assert note in capfd.readouterr().out


@pytest.mark.parametrize("errors", ["stop", "missing"])
def test_a_function_that_returns_nothing_is_named(example, monkeypatch, capfd, errors):
    monkeypatch.chdir(example)
    (example / "rewards.py").write_text("def nothing(rollout, row):\n    rollout.text == row['answer']\n")
    options = f"--reward.functions rewards.py:nothing --reward.weights 1 --reward.errors {errors}"
    assert main(["train", "run.toml", *small("x"), *options.split()]) == 2
    said = "solera: evaluation: rewards.py:nothing returned no number for any of 10 responses; is a return statement "
    said += "missing, or does every call fail (reward.errors)?;"
    assert said in capfd.readouterr().err


def test_the_command_line_takes_several_functions_and_weights(example, monkeypatch):
    monkeypatch.chdir(example)
    options = "--reward.functions number rewards.py:digits --reward.weights 1 -0.25 --reward.overlong_buffer 8"
    assert main(["train", "run.toml", *small("x"), *options.split()]) == 0
    written = (example / "runs" / "x" / "config.toml").read_text()
    assert 'functions = ["number", "rewards.py:digits"]\nweights = [1.0, -0.25]' in written


def test_a_reward_that_fails_stops_the_run_with_one_line_and_can_be_mended(example, monkeypatch):
    good = (example / "rewards.py").read_text()
    (example / "rewards.py").write_text(
        good.replace("    if len(rollout.text)", "    row['nothing']\n    if len(rollout.text)")
    )
    done = solera("train", "run.toml", *small("x"), cwd=example)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "reward rewards.py:digits raised KeyError: 'nothing' (rewards.py, line 6)" in done.stderr
    assert done.stderr.startswith("solera: data.jsonl:")
    assert done.stderr.endswith(
        "; once that is fixed (settings are in runs/x/config.toml), continue with: solera train --resume runs/x\n"
    )
    (example / "rewards.py").write_text(good)
    monkeypatch.chdir(example)
    assert main(["train", "--resume", "runs/x"]) == 0
    assert (example / "runs" / "x" / "model").is_dir()


def test_a_run_that_is_resumed_elsewhere_says_where_it_was_started(example, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(example)
    assert main(["train", "run.toml", *small("x")]) == 0
    shutil.rmtree("runs/x/model")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert main(["train", "--resume", "example/runs/x"]) == 2
    said = capfd.readouterr().err
    assert said.endswith(f"; the run was started in {example}: run the command there\n") and said.count("\n") == 1
    Path("rewards.py").write_text((example / "rewards.py").read_text())
    assert main(["train", "--resume", "example/runs/x"]) == 2
    assert capfd.readouterr().err.startswith("solera: data.jsonl: cannot be read: No such file or directory; the run")
    monkeypatch.chdir(example)
    assert main(["train", "--resume", "runs/x"]) == 0


@pytest.mark.parametrize(("removed", "told"), [(slice(0), False), (slice(1), True), (slice(-20, None), True)])
def test_a_resume_says_where_it_begins_and_whether_the_data_has_changed(example, monkeypatch, capfd, removed, told):
    monkeypatch.chdir(example)
    assert main(["train", "run.toml", *small("x"), "--checkpoint.every", "1"]) == 0
    shutil.rmtree("runs/x/model")
    lines = Path("data.jsonl").read_text().splitlines(keepends=True)
    del lines[removed]
    Path("data.jsonl").write_text("".join(lines))
    last = max(int(path.name.removeprefix("step-")) for path in Path("runs/x/checkpoints").glob("step-*"))
    capfd.readouterr()
    assert main(["train", "--resume", "runs/x"]) == 0
    said = capfd.readouterr().out
    assert f"note: resuming from step {last}\n" in said
    note = "note: the task's problems have changed since the run started (data.jsonl has changed): accuracies"
    assert (note in said) == told
    assert ("has changed" in said) == told


@pytest.mark.parametrize("older", [False, True], ids=["with its rows' digest", "begun before there was one"])
def test_a_resume_notices_an_edit_in_any_row_to_train_on(example, monkeypatch, capfd, older):
    monkeypatch.chdir(example)
    assert main(["train", "run.toml", *small("x")]) == 0
    shutil.rmtree("runs/x/model")
    if older:
        beginning = json.loads(Path("runs/x/beginning.json").read_text())
        del beginning["rows"]
        Path("runs/x/beginning.json").write_text(json.dumps(beginning))
    training, _ = read_split(resolve_task(TaskConfig("jsonl", path="data.jsonl", held_out_share=0.2)), frozenset())
    number = int(training[100].place.rpartition(":")[2]) - 1  # neither held out nor one of the run's first two
    lines = Path("data.jsonl").read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), "answer": "7"})
    Path("data.jsonl").write_text("\n".join(lines))
    capfd.readouterr()
    assert main(["train", "--resume", "runs/x"]) == 0
    said = capfd.readouterr().out
    note = "note: data.jsonl has changed since the run started: it continues with different training rows\n"
    assert (note in said, "has changed" in said) == (not older, not older)


def test_a_resume_tells_what_was_edited_in_the_config(example, monkeypatch, capfd):
    monkeypatch.chdir(example)
    assert main(["train", "run.toml", *small("x")]) == 0
    shutil.rmtree("runs/x/model")
    file = Path("runs/x/config.toml")
    edited = file.read_text().replace("\ngrad_clip = 1.0\n", "\ngrad_clip = 0.5\n")
    edited = edited.replace("# micro_batch_tokens is unset", "micro_batch_tokens = 500")
    assert edited.count("grad_clip = 0.5") == edited.count("micro_batch_tokens = 500") == 1
    file.write_text(edited)
    capfd.readouterr()
    assert main(["train", "--resume", "runs/x"]) == 0
    fields = "learn.grad_clip is 0.5, was 1.0; learn.micro_batch_tokens is 500, was unset"
    note = f"settings have changed since the run started: {fields}"
    assert f"note: {note}\n" in capfd.readouterr().out


def test_a_run_stopped_by_its_reward_goes_on_as_if_nothing_had_happened(example, monkeypatch, capfd):
    monkeypatch.chdir(example)
    good = (example / "rewards.py").read_text()
    bad = "calls = []\n" + good.replace(
        "    if len(rollout.text)",
        "    calls.append(1)\n    assert len(calls) < 160, 'tired'\n    if len(rollout.text)",
    )
    assert main(["train", "run.toml", *small("whole", steps=6)]) == 0
    (example / "rewards.py").write_text(bad)
    assert main(["train", "run.toml", *small("mended", steps=6)]) == 2
    assert "raised AssertionError: tired" in capfd.readouterr().err
    assert list((example / "runs" / "mended" / "checkpoints").iterdir())
    (example / "rewards.py").write_text(good)
    assert main(["train", "--resume", "runs/mended"]) == 0
    whole, mended = (
        [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in path.open()]
        for path in (example / "runs" / "whole" / "metrics.jsonl", example / "runs" / "mended" / "metrics.jsonl")
    )
    assert whole == mended


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            "--reward.weights 1 --reward.functions rewards.py:digit",
            "digit does not exist; functions of rewards.py: digits, carried",
        ),
        ("--reward.weights 1 --reward.functions reward.py:digits", "there is no file reward.py"),
        ("--reward.weights 1 --reward.functions digits", "not one of the graders exact, verbatim, number"),
        ("--reward.weights 1 2", "reward.weights has 2 numbers for 3 in reward.functions"),
        ("--reward.timeout 0", "use a number of seconds above 0"),
        ("--reward.truncated_reward -2", 'has no effect without reward.truncated = "penalise"'),
        ("--reward.overlong_buffer 17", "more than sampling.max_tokens = 16"),
        ("--reward.overlong_penalty 2", "has no effect without reward.overlong_buffer above 0"),
        ("--task.answer sum", "data.jsonl:1: field 'sum' is missing"),
        (
            "--task.prompt question",
            "data.jsonl:1: field 'question' is missing; the fields are 'prompt', 'answer', 'carries'",
        ),
        ("--task.level 2", "task.level is not used by jsonl"),
        ("--sampling.max_tokens 60", "model has room for"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(example, monkeypatch, capfd, options, says):
    monkeypatch.chdir(example)
    assert main(["train", "run.toml", *options.split()]) == 2
    said = capfd.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert {path.name for path in example.iterdir()} == {"data.jsonl", "rewards.py", "run.toml"}


@pytest.fixture
def model(tmp_path):
    """A folder with a random Llama whose tokenizer has a chat template (or none) and no pad token."""

    def make(template: str | None) -> Path:
        vocabulary = {"<end>": 0, **{character: i for i, character in enumerate(CHARACTERS, 1)}}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
        tokenizer.chat_template = template
        assert tokenizer.pad_token is None
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=1, max_position_embeddings=64, eos_token_id=0, bos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


def chat_config(tmp_path: Path, model: Path):
    messages = [[{"role": "system", "content": "sum"[:1]}, {"role": "user", "content": f"{i}+{i}="}] for i in range(10)]
    lines = [json.dumps({"prompt": prompt, "answer": str(2 * i)}) for i, prompt in enumerate(messages)]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines, '{"prompt": "1+2=", "answer": "3"}']))
    (tmp_path / "rewards.py").write_text("def short(rollout, row): return -len(rollout.text)")
    return resolved(
        parse(
            f"""
            task = {{ name = "jsonl", path = "{tmp_path / "chat.jsonl"}", held_out_share = 0.3 }}
            reward = {{ functions = ["exact", "{tmp_path / "rewards.py"}:short"], truncated = "mask" }}
            model = {{ path = "{model}" }}
            sampling = {{ max_tokens = 6 }}
            run = {{ root = "{tmp_path}", name = "run", steps = 3, device = "cpu" }}
            collect = {{ prompts = 4, group_size = 4 }}
            evaluate = {{ problems = 2 }}
            report = {{ tensorboard = false, progress = false, page = false }}
            """,
            "test",
        )
    )


def test_chat_messages_go_through_the_template_and_no_pad_token_is_needed(tmp_path, model):
    config = chat_config(tmp_path, model(TEMPLATE))
    _, codec = loading.load(config.model.path, torch.device("cpu"))
    task = build_task(config, codec)
    prompts = {codec.decode(torch.tensor(task.prompt(i).token_ids).numpy()) for i in range(30)}
    assert prompts <= {"1+2=", *(f"s:s u:{i}+{i}= a:" for i in range(10))}
    assert len(prompts) > 3
    result = train(config)
    assert result.metrics[0]["tokens/trained"] > 0
    assert result.metrics[0]["reward/short"] < 0
    assert 0 < result.metrics[0]["response/truncated"] < 1


def test_a_model_without_a_template_is_told_so_with_file_and_line(tmp_path, model):
    config = chat_config(tmp_path, model(None))
    with pytest.raises(
        SoleraError, match=r"chat.jsonl:\d+: field 'prompt' holds chat messages, but the model has no chat"
    ):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_template_that_refuses_is_quoted_with_file_and_line(tmp_path, model):
    config = chat_config(tmp_path, model("{{ raise_exception('roles must\nalternate') }}"))
    says = r"chat.jsonl:\d+: field 'prompt' is refused by the model's chat template: roles must alternate"
    with pytest.raises(SoleraError, match=says):
        train(config)
    assert not (tmp_path / "run").exists()


def test_characters_that_the_model_cannot_read_are_named(example, monkeypatch, capfd):
    with (example / "data.jsonl").open("a") as file:
        file.write('{"prompt": "1+1 is", "answer": "2", "carries": 0}')
    monkeypatch.chdir(example)
    assert main(["train", "run.toml"]) == 2
    said = capfd.readouterr().err
    assert said == "solera: data.jsonl:241: field 'prompt' holds 'i', which the model's tokenizer does not know\n"


def test_the_page_shows_the_example_as_it_is():
    blocks = (ROOT / "docs" / "data.md").read_text().split("```")[1::2]
    for language, name in (("json", "data.jsonl"), ("python", "rewards.py"), ("toml", "run.toml")):
        (shown,) = [block.removeprefix(language).strip() for block in blocks if block.startswith(f"{language}\n")]
        assert shown in (EXAMPLE / name).read_text()

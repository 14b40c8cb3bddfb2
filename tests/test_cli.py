"""The real command in a process of its own, as a user types it."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest

from tests.command import ROOT, SEARCH_PATH, run_script, solera, start

SMALL = "--run.steps 3 --collect.prompts 4 --collect.group_size 4 --evaluate.problems 10 --run.device cpu".split()  # noqa: SIM905


def test_help_answers_at_once_without_torch():
    seconds = []
    for _ in range(5):
        before = time.perf_counter()
        done = solera("--help", fresh=True)
        seconds.append(time.perf_counter() - before)
        assert done.returncode == 0
        assert "train" in done.stdout
    assert statistics.median(seconds) < 0.5
    program = "import sys, solera.cli; solera.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


def test_train_help_explains_every_field():
    import dataclasses

    from solera.config import Config

    done = solera("train", "--help", COLUMNS="200")
    assert done.returncode == 0
    shown = {("model", "path"): "--model", ("task", "name"): "--task", ("objective", "name"): "--objective"}
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            assert shown.get((section.name, field.name), f"--{section.name}.{field.name}") + " " in done.stdout
    assert "Passes over each batch" in done.stdout


def test_help_of_a_command_may_be_asked_for_before_it():
    assert solera("help", "data", "import").stdout == solera("data", "import", "--help").stdout
    assert solera("help").stdout == solera("--help").stdout


def test_version():
    assert solera("--version").stdout.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["frobnicate"], "unknown command 'frobnicate'; use one of train, eval, generate, data"),
        (["data", "exprot", "nowhere", "x"], "did you mean export?"),
        (["train", "--run.stepz", "3"], "did you mean --run.steps?"),
        (["train", "--beta", "0.1"], "did you mean --objective.beta?"),
        (["train", "--temperature", "1"], "did you mean --evaluate.temperature or --sampling.temperature?"),
        (["train", "--model.name", "x"], "model has path, compute, compile (see solera train --help)"),
        (["train", "--objective.epsilon", "0.3"], "did you mean epsilon_low or epsilon_high?"),
        (["train", "--run.steps", "many"], "--run.steps"),
        (["train", "--sync.rule", "often"], "--sync.rule is 'often' but must be one of every, never, adaptive"),
        (["train", "--sync.v_max", "1.0", "2.0"], "--sync.v_max takes one value, not 2: ['1.0', '2.0']"),
        (["train", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["train", "--objective", "gropo"], "did you mean grpo"),
        (
            ["train", "--objective", "nonsuch"],
            "objective.name is 'nonsuch'; there is no such objective (solera algorithms lists all 36)\n",
        ),
        (["train", "--objective", "grpo", "--objective.centre", "one"], "objective.centre is not used by grpo"),
        (["train", "--sampling.top_p", "0.9"], "training needs the whole distribution"),
        (["train", "--collect.group_size", "1"], "use 2 or more"),
        (["train", "--objective.ref_period", "5"], "set objective.beta above 0"),
        (["train", "--model", "no/such/folder"], "no such folder"),
        (["train", "--model", "embeded"], "did you mean embedded?"),
        (["train", "--collect.refill_rounds", "5"], "only has an effect with objective.refill = true"),
        (["train", "--task", "sums"], "use one of arithmetic, jsonl"),
        (
            ["train", "--task", "countdown"],
            "holds 'M', which the model's tokenizer does not know: use another --model\n",
        ),
        (["train", "--learn.learning_rate", "1e-5"], "did you mean --learn.lr?"),
        (["train", "--learning_rate", "1e-5"], "did you mean --learn.lr?"),
        (["train", "--max_steps=3"], "did you mean --run.steps?"),
        (["train", "--resume"], "--resume needs a run's folder, such as runs/NAME"),
        (["train", "--resume", "runs/x", "--run.steps", "5"], "runs/x: no config.toml"),
        (["train", "--run.steps", "5", "--resume=runs/x"], "runs/x: no config.toml"),
        (["train", "--resume", "nowhere"], "nowhere: no config.toml"),
        (["train", "--task.level", "9"], "levels 1 to 4"),
        (
            ["train", "--sampling.max_tokens", "60"],
            "a prompt of 6 tokens and sampling.max_tokens = 60 do not fit the model's context of 64",
        ),
        (
            ["train", "data.jsonl"],
            "data.jsonl is data, not a TOML config; to train on it: solera train --task",
        ),
        (["train", "."], ". is a folder, not a TOML config; to resume a run: solera train --resume .; for a model:"),
        (["bench", "--json", "no/such/a.json"], "--json no/such/a.json: cannot write a file to no/such"),
        (["train", "--run.device", "cuda"], "torch finds no GPU"),
        (["train", "--report.wandb", "project"], "pip install wandb"),
        (["report"], "arguments are required: RUN (see solera report --help)"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["report", "."], "it has neither config.toml nor metrics.jsonl"),
        (["report", "nowhere", "--groups", "few"], "invalid int value: 'few'"),
        (["report", "nowhere", "--groups", "-1"], "--groups is -1; it must be at least 0"),
        (["report", "nowhere", "--groops", "3"], "unknown option --groops; did you mean --groups?"),
        (["report", "nowhere", "--groups", "3", "4"], "unexpected argument 4 after --groups (see"),
        (["data", "reward", "nowhere", "--vlaue", "3"], "did you mean --value?"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2_and_leaves_nothing(tmp_path, arguments, says):
    import importlib.util

    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    if "--report.wandb" in arguments and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed here")
    done = solera(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("solera: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert not list(tmp_path.rglob("*"))


WITHOUT_TORCH = """
import contextlib, io, json, sys
import solera.cli
sys.modules["wandb"] = sys.modules["psycopg"] = None  # as where they are not installed
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = solera.cli.main(line.split())
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""
REFUSED_WITHOUT_TORCH = {
    "train --resume nowhere": "nowhere: no config.toml, so there is no run to resume here",
    "train --resume finished": "finished: the run is finished; its model is in finished/model",
    "train --resume owned": "resume it with solera.resume('owned', task=...)",
    "train --resume nameless": "nameless/config.toml: run.name is unset",
    "train --run.device cpu --model.compute float16": "model.compute is float16, which needs a GPU",
    "train --run.device cpu --run.gpu_memory 3": "run.gpu_memory is set, but this run is on a CPU: remove it",
    "train --collect.prompts 200000": "and collect.group_size 8; a batch has at most 1,000,000 responses",
    "train --store.data nowhere.jsonl": "nowhere.jsonl: cannot be read: No such file or directory",
    "train --report.wandb mine": "pip install wandb",
    "train --store.url postgresql://nobody@127.0.0.1:1/x --run.name mine": "PostgreSQL needs the package psycopg",
    "train --reward.functions own.py:one": "own.py:one takes (x); a reward function takes (rollout, row)",
    "train --reward.functions own.py:no": "own.py:no: no does not exist; functions of own.py: one",
    "train --task jsonl --task.path sums.jsonl --reward.functions own.py:trl": "the columns are answer, level",
    "train --resume begun": "own.py:one takes (x); a reward function takes (rollout, row)",
    "eval embedded --reward.functions own.py:one": "own.py:one takes (x)",
    "eval owned": "owned was trained with a task or rewards from your own code",
    "data import finished nowhere.jsonl": "nowhere.jsonl: cannot be read: No such file or directory",
    "bench --model nosuch": "model 'nosuch': no such folder",
    "bench --device cpu --gpu_memory 3": "--gpu_memory is set, but this runs on a CPU: remove it",
}


@pytest.fixture(scope="module")
def refused_without_torch(tmp_path_factory) -> dict[str, tuple[int, str, bool]]:
    """Status, error and whether torch was loaded, of each command, all in one process that has not loaded it."""
    from solera.config import Config, dump, override
    from solera.store.ledger import Ledger

    folder = tmp_path_factory.mktemp("refused")
    for name in ("finished", "owned", "nameless"):
        (folder / name).mkdir()
        config = Config() if name == "nameless" else override(Config(), "run", name=name)
        (folder / name / "config.toml").write_text(dump(config))
    (folder / "finished" / "model").mkdir()
    (folder / "owned" / "own_code.json").write_text('["task"]')
    (folder / "begun").mkdir()
    (folder / "begun" / "config.toml").write_text('run.name = "begun"\nreward.functions = ["own.py:one"]')
    (folder / "own.py").write_text("def one(x): ...\ndef trl(completions, truth): ...\n")
    rows = [{"prompt": f"{number}+1=", "answer": number + 1, "level": 1} for number in range(50)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Ledger(folder / "finished" / "store.db").close()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH}, input="\n".join(REFUSED_WITHOUT_TORCH),
    )  # fmt: skip
    return dict(zip(REFUSED_WITHOUT_TORCH, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("arguments", REFUSED_WITHOUT_TORCH)
def test_what_needs_no_torch_is_refused_before_it_is_loaded(arguments, refused_without_torch):
    status, said, loaded = refused_without_torch[arguments]
    assert REFUSED_WITHOUT_TORCH[arguments] in said
    assert said.count("\n") == 1 and status == 2, said
    assert not loaded


LITTLE_MEMORY = """
import resource, sys
import solera.cli
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
sys.exit(solera.cli.main(sys.argv[1:]))
"""


def test_memory_that_ends_is_said_in_one_line(tmp_path):
    with open(tmp_path / "large.toml", "wb") as file:
        file.truncate(2**33)
    script = tmp_path / "little.py"
    script.write_text(LITTLE_MEMORY)
    done = run_script(script, "train", "large.toml", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stderr) == (1, "solera: there is too little memory (--debug shows where it ended)\n")


def test_train_writes_a_run_and_will_not_write_over_it(tmp_path):
    command = ["train", str(ROOT / "recipes" / "demo.toml"), *SMALL, "--run.root", "out", "--run.name", "mine"]
    done = solera(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.splitlines()[0] == "run    out/mine"  # so that one can look at it while it trains
    assert next(line for line in done.stdout.splitlines() if line.startswith("step")).split()[1] == "0/3"
    rows = [json.loads(line) for line in (tmp_path / "out" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    again = solera(*command, cwd=tmp_path)
    assert again.returncode == 2
    assert "out/mine already exists: extend it (solera train --resume out/mine --run.steps N)" in again.stderr


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = solera("train", *SMALL, "--run.root", str(tmp_path / "file"), "--run.name", "x")
    assert done.returncode == 2
    assert "the folder cannot be created" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_whose_reader_leaves_saves_and_stops_and_can_go_on(tmp_path):
    options = "--run.steps 400 --collect.prompts 4 --evaluate.every 5 --evaluate.problems 10 --run.name left".split()  # noqa: SIM905
    with start("train", *options, cwd=tmp_path) as left:
        for _ in range(2):
            left.stdout.readline()
        left.stdout.close()
        said = left.stderr.read()
    assert left.returncode == 141, said
    assert "continue with: solera train --resume runs/left" in said
    assert said.count("\n") == 1
    assert list((tmp_path / "runs" / "left" / "checkpoints").iterdir())


def test_the_same_from_python(tmp_path):
    """The program of the README."""
    readme = (ROOT / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    assert len(program.strip().splitlines()) <= 12
    (tmp_path / "program.py").write_text(program.replace("steps=200", "steps=3"))
    done = run_script(tmp_path / "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/model/model.safetensors"))


def test_a_folder_named_solera_beside_a_program_does_not_hide_the_package(tmp_path):
    """As beside a clone of the repository."""
    (tmp_path / "solera").mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import solera; solera.RunConfig"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_debug_shows_the_traceback_and_a_reader_that_left_is_no_error():
    plain = solera("train", "nowhere.toml", "--debug")
    assert "Traceback" in plain.stderr and "nowhere.toml: cannot be read" in plain.stderr
    command = f"{sys.executable} -c 'import sys; from solera.cli import main; sys.exit(main([\"algorithms\"]))'"
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(
        ["bash", "-c", f"({command}; echo $? >&2) | true"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stderr.strip() in ("0", "141")


def test_ctrl_c_while_the_process_ends_prints_nothing():
    program = (
        "import atexit, sys, time, solera.cli\n"
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(60)))\n"
        "sys.argv[1:] = ['--version']\n"
        "sys.exit(solera.cli.command())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ending:
        while ending.stdout.readline() != b"ending\n":
            assert ending.poll() is None
        ending.send_signal(signal.SIGINT)
        assert ending.stderr.read() == b""
    assert ending.returncode == -signal.SIGINT


def test_a_run_without_anything_to_learn_from_says_so_before_it_ends(tmp_path):
    """Four-digit sums, of which the embedded model gets none right: every group is flat from the first batch on."""
    hard = ["--task.level", "4", "--run.root", str(tmp_path), "--run.name", "hard", "--run.steps", "12"]
    done = solera("train", *SMALL, *hard)
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "of the groups had equal rewards" in line]
    assert len(said) == 1
    assert said[0].startswith("note: step 9: in the last 10 batches all")
    assert "In the last 10 batches all of the groups had equal rewards" in (tmp_path / "hard/report.html").read_text()


def test_a_run_from_a_runs_model_names_the_learning_rate_that_made_it(tmp_path):
    options = (*SMALL, "--report.page", "false", "--report.tensorboard", "false")
    solera("train", *options, "--run.name", "first", "--learn.lr", "7e-4", cwd=tmp_path)
    model = tmp_path / "runs" / "first" / "model"
    named = solera("train", *options, "--run.name", "second", "--model", model, cwd=tmp_path)
    assert (
        "1e-06 is used, a safe value for a pretrained model; the run that made this model used 0.0007\n" in named.stdout
    )
    (model.parent / "config.toml").write_text("[learn\n")
    damaged = solera("train", *options, "--run.name", "third", "--model", model, cwd=tmp_path)
    assert damaged.returncode == 0 and "a safe value for a pretrained model\n" in damaged.stdout

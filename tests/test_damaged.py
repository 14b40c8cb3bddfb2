"""Run folders and models with something missing or damaged: one line that names the file, and no traceback."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from solera.cli import main
from solera.errors import SoleraError
from solera.folder.files import seal
from solera.models import loading
from solera.models.source import EMBEDDED

RUN = """
run = { root = ".", name = "whole", steps = 4, device = "cpu" }
collect = { prompts = 2, group_size = 4, offset = 1 }
evaluate = { every = 0, problems = 4 }
checkpoint = { every = 2 }
report = { tensorboard = false, progress = false, page = false }
"""
NEWEST = "checkpoints/step-000004"
GARBAGE = [b"", b"garbage", bytes(100), b"[]", b"null", b"\xff\xfe", b"{"]
BAD_ROWS = b'{"started_in": "/", "problems": "", "rows": 3}'


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def half(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def state(**fields: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / NEWEST / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        seal(path.parent)  # what a checkpoint without digests would be taken for

    return write


def tensors(content: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        torch.save(content, folder / NEWEST / "tensors.pt")
        seal(folder / NEWEST)

    return write


MODEL_FILES = ["config.json", "model.safetensors", "tokenizer.json"]
OTHER_MODEL_FILES = ["generation_config.json", "tokenizer_config.json"]
PARTS = ["state.json", "tensors.pt", *(f"model/{name}" for name in MODEL_FILES)]
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("no config.toml", without("config.toml")),
    ("the model", without(f"{NEWEST}/model")),
    *((NEWEST, without(f"{NEWEST}/{part}")) for part in PARTS),
    *((NEWEST, half(f"{NEWEST}/{part}")) for part in PARTS),
    *((NEWEST, put(f"{NEWEST}/{part}", content)) for part in PARTS for content in GARBAGE),
    *((NEWEST, put(f"{NEWEST}/model/tokenizer_config.json", content)) for content in GARBAGE),
    *((NEWEST, state(**{name: value})) for name in ("version", "position", "watermark")
      for value in ("x", None, -1, 1.5, [], True)),
    *((NEWEST, state(uses=value)) for value in (3, [1], [1, -1], ["x", 2], {})),
    *((NEWEST, state(sync=value)) for value in (None, [1], "x", {"more": 1})),
    (NEWEST, state(version=99)), (NEWEST, state(more=1)),
    *((NEWEST, tensors(value)) for value in ([1], {}, {"learner": {}}, {"learner": {}, "engine": {}},
                                             {"learner": None, "engine": {}})),
    ("step-000099", lambda folder: (folder / "checkpoints" / "step-000099").mkdir()),
    *((r"config\.toml", put("config.toml", content)) for content in (b"", b"[run", b"\xff",
    b"[run]\nname='a'\nsteps=-1",
                                                                   b"[lern]",
      b"[run]\nname = 'a'\n[task]\nname = 'x'")),
    *((r"metrics\.jsonl:\d", put("metrics.jsonl", content + b"\n")) for content in [*GARBAGE, b'{"step": "x"}',
    b"{}"] if content),
    *((r"store\.db", put("store.db", content)) for content in (b"", b"garbage" * 100,
    b"SQLite format 3\0" + b"\xff" * 5000)),
    (r"store\.db", half("store.db")), (r"store\.db", without("store.db")),
    *((r"own_code\.json", put("own_code.json", content)) for content in [*GARBAGE, b"3", b'["x"]',
    b"[[]]"] if content != b"[]"),
    *((r"beginning\.json", put("beginning.json", content)) for content in [*GARBAGE, b"3", b'["x"]', b"{}", BAD_ROWS]),
    (r"solera\.resume\('x', task=\.\.\.\)", put("own_code.json", b'["task"]')),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was stopped after its last checkpoint."""
    root = tmp_path_factory.mktemp("whole")
    (root / "run.toml").write_text(RUN.replace('"."', f'"{root}"'))
    assert main(["train", str(root / "run.toml")]) == 0
    shutil.rmtree(root / "whole" / "model")
    return root / "whole"


def refusal(capfd, *arguments: str) -> str:
    capfd.readouterr()
    assert main(list(arguments)) == 2
    said = capfd.readouterr()
    assert not said.out
    assert re.fullmatch(r"solera: [^\n]{10,600}\n", said.err), said.err
    return said.err


def test_a_damaged_run_is_not_resumed_and_the_damage_is_named(tmp_path, monkeypatch, capfd, whole):
    monkeypatch.chdir(tmp_path)
    for number, (names, damage) in enumerate(DAMAGE):
        shutil.copytree(whole, "x")
        damage(Path("x"))
        before = {path for path in Path("x").rglob("*") if path.name != "store.db"}
        said = refusal(capfd, "train", "--resume", "x")
        assert re.search(NEWEST if names == "the model" else names, said), (number, said)
        assert {path for path in Path("x").rglob("*") if path.name != "store.db"} == before, number
        shutil.rmtree("x")


def test_a_last_line_cut_off_is_written_again(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "x")
    text = Path("x/metrics.jsonl").read_bytes()
    Path("x/metrics.jsonl").write_bytes(text[:-20])
    assert main(["train", "--resume", "x"]) == 0
    assert [json.loads(line)["step"] for line in Path("x/metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "m")
    return Path("m")


def edited(path: Path, **fields: object) -> None:
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def test_a_damaged_model_is_named_and_no_folder_is_made(model, capfd):
    for damage in [damage for name in MODEL_FILES
                   for damage in (without(name), half(name), *(put(name, content) for content in [*GARBAGE,
                   b"{}"]))]:  # fmt: skip
        shutil.rmtree(model)
        shutil.copytree(EMBEDDED, model)
        damage(model)
        for command in (["train", "--model", "m", "--run.device", "cpu"], ["eval", "m"]):
            assert "model m: " in refusal(capfd, *command)
        assert [path.name for path in Path().iterdir()] == ["m"]


@pytest.mark.parametrize("name", [*MODEL_FILES, *OTHER_MODEL_FILES])
def test_a_file_that_cannot_be_read_is_named(model, name):
    """Also where transformers would go on without it: other end tokens would come of it, and other rewards."""
    whole = (model / name).read_bytes()
    for content in (whole[: len(whole) // 2], *GARBAGE, b"3", b"[" * 100_000):
        (model / name).write_bytes(content)
        for read in (lambda: loading.load("m", torch.device("cpu")), lambda: loading.load_reader("m")):
            with pytest.raises(SoleraError, match=rf"^model m: {name} is damaged: [^\n]+$"):
                read()


def test_a_tokenizer_that_is_json_and_no_tokenizer_is_one_line(model):
    """One letter of a key that another package needs: it raises a bare Exception."""
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace("single_word", "singlf_word"))
    for read in (lambda: loading.load("m", torch.device("cpu")), lambda: loading.load_reader("m")):
        with pytest.raises(
            SoleraError, match=r"^model m: its tokenizer \(tokenizer\.json\) cannot be loaded: "
        ) as said:
            read()
        assert "single_word" in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("template", "says"),
    [(b"{% for", "is refused by the model's chat template"), (b"\xff", "chat_template.jinja is damaged")],
)
def test_a_damaged_chat_template_is_named(model, capfd, template, says):
    (model / "chat_template.jinja").write_bytes(template)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    Path("chat.jsonl").write_text(json.dumps(row))
    Path("text.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}')
    task = ["--task", "jsonl", "--task.path", "chat.jsonl", "--task.held_out_path", "text.jsonl"]
    assert says in refusal(capfd, "train", "--model", "m", *task)


def test_a_model_that_does_not_fit_its_tokenizer_or_knows_no_end_is_refused(model, capfd):
    (model / "generation_config.json").unlink(missing_ok=True)
    edited(model / "config.json", eos_token_id=None)
    edited(model / "tokenizer_config.json", eos_token=None)
    assert "names an end token (eos)" in refusal(capfd, "train", "--model", "m")
    shutil.rmtree(model)
    shutil.copytree(EMBEDDED, model)
    edited(model / "config.json", hidden_size=48)
    assert "model m: " in refusal(capfd, "train", "--model", "m")
    assert [path.name for path in Path().iterdir()] == ["m"]


def test_chat_messages_need_a_chat_template_and_a_pad_token_is_not_needed(model, capfd):
    edited(model / "tokenizer_config.json", pad_token=None)
    edited(model / "config.json", pad_token_id=None)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    Path("chat.jsonl").write_text(json.dumps(row))
    Path("text.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}')
    task = ["--task", "jsonl", "--task.path", "chat.jsonl", "--task.held_out_path", "text.jsonl"]
    said = refusal(capfd, "train", "--model", "m", *task)
    assert "chat.jsonl:1: field 'prompt' holds chat messages, but the model has no chat template" in said
    small = "--run.steps 1 --collect.prompts 2 --evaluate.problems 2 --run.device cpu".split()  # noqa: SIM905
    assert main(["train", "--model", "m", *small]) == 0

"""Small real parts that several tests share: a random Llama, rollouts with every kind of raggedness, short runs."""

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from solera.config import Config, parse
from solera.records import Completion, Reward, Rollout, Sequence
from solera.store.database import Place, place_of
from tests.command import start_server
from tests.postgres import find_programs, running_server

if TYPE_CHECKING:  # xdist's first process reads this file and runs no test: torch would delay the workers by seconds
    from solera.models.language_model import LanguageModel
    from solera.run.running import Result

VOCABULARY = 11
END = 1
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"


LONG = (
    "tests/test_resume.py", "tests/bench/test_bench.py", "tests/sweep/test_command.py", "tests/test_probe.py",
    "tests/test_protocols.py", "tests/store/test_crash.py", "tests/tasks/test_pairs.py", "tests/test_examples.py",
    "tests/test_hub.py", "tests/test_no_fresh_data.py", "tests/report/test_sinks.py", "tests/tasks/test_sandbox.py",
    "tests/sweep/test_machine.py", "tests/sweep/test_time.py", "tests/tasks/test_judge_model.py", "tests/test_lean.py",
)  # fmt: skip
"""Files with tests of ten seconds and more."""


def pytest_configure(config: pytest.Config) -> None:
    """xdist's first process starts the server that forks commands, for all workers."""
    shares = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if shares and sys.platform == "linux" and not config.option.collectonly:
        start_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first. Otherwise one worker would still run one when the other has nothing left to do."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Tests create many small objects. Python's collector would walk through all of torch again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def suited() -> None:
    """As in a run with a small model (`solera/models/small.py`)."""
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)


@pytest.fixture
def tiny() -> "LanguageModel":
    """A random Llama in float64 with a distribution far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from solera.models.language_model import LanguageModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.3, eos_token_id=END,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LanguageModel(LlamaForCausalLM(config).double().eval())


def random_rollout(rng: np.random.Generator, key: int, prompt: tuple[int, ...], reward: float, **fields) -> Rollout:
    """A response of random length and tokens to a prompt, with made-up behaviour log-probabilities."""
    length = int(rng.integers(1, 9))
    completion = Completion(
        rng.integers(2, VOCABULARY, length).astype(np.int32),
        -rng.exponential(2.0, length).astype(np.float32),
        ((length, 0),),
        "stop",
    )
    sequence = Sequence.turns((prompt, completion))
    return Rollout(f"prompt/{key}", (sequence,), (Reward(reward),), lineage="test", **fields)


def random_prompt(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(2, VOCABULARY, int(rng.integers(1, 7))))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server: the one that is named, or one that lives as long as the tests."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (extra: postgres)")
    if named := os.environ.get("SOLERA_TEST_POSTGRES"):
        yield named
        return
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL was found: apt-get install postgresql, or name one in SOLERA_TEST_POSTGRES")
    with running_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a new store may be made, in each kind of database."""
    if request.param == "sqlite":
        return tmp_path / "store.db"
    return place_of(request.getfixturevalue("postgres"), tmp_path / f"run-{uuid.uuid4().hex}")


@pytest.fixture
def short_run(tmp_path: Path):
    """Train for a few small batches from TOML text; returns the result."""
    from solera.run.running import train

    def run(toml: str = "", name: str = "short") -> "Result":
        base = f"""
            run = {{ root = "{tmp_path}", name = "{name}", steps = 6, device = "cpu" }}
            collect = {{ prompts = 8, group_size = 8 }}
            evaluate = {{ every = 0, problems = 8 }}
            report = {{ tensorboard = false, progress = false, page = false }}
        """
        return train(merge(parse(base, "base"), toml))

    return run


def merge(config: Config, toml: str) -> Config:
    """Fields of a TOML text over a config."""
    import dataclasses
    import tomllib

    for section, values in tomllib.loads(toml).items():
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    return config


@pytest.fixture(scope="session")
def small_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer knows every byte and has a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=8192, eos_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder

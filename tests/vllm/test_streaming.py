"""A run that streams from a real server while its weights change: what the store says about every token."""

import json
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from solera import open_store
from solera.config import InFlight, parse
from solera.records import Rollout
from solera.report.sinks import read_metrics
from solera.run import running
from tests.vllm.conftest import model_of
from tests.vllm.counters import sampled_by
from tests.vllm.proxy import GENERATE, Proxy, Spoil

pytestmark = pytest.mark.vllm
CLOSE = 5e-4
STEPS, PROMPTS, GROUP, MAX_AGE = 8, 4, 4, 2

RUN = """
run = {{ root = "{root}", name = "run", steps = {steps}, device = "cpu" }}
model = {{ path = "{model}" }}
engine = {{ name = "vllm", urls = ["{url}"] }}
sampling = {{ max_tokens = 50, temperature = 0.9 }}
collect = {{ mode = "stream", prompts = {prompts}, group_size = {group}, max_age = {max_age} }}
sync = {{ period = 1, in_flight = "{in_flight}" }}
learn = {{ lr = 0.003 }}
diagnose = {{ every = 0 }}
evaluate = {{ every = 0, problems = 8 }}
checkpoint = {{ every = 1, keep = 100 }}
report = {{ tensorboard = false, progress = false }}
"""


def even_digits(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward with some variance for text without sense."""
    return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in completions]


def stored(run: Path) -> list[tuple[Rollout, int | None]]:
    """All rollouts of the run, with the version that learned from each."""
    with closing(sqlite3.connect(run / "store.db")) as store:
        used = dict(store.execute("select rollout_id, version from uses").fetchall())
        ids = [id_ for (id_,) in store.execute("select id from rollouts order by id")]
    with closing(open_store(run)) as store:
        return [(rollout, used.get(rollout.id)) for rollout in store.fetch(ids)]


@torch.no_grad()
def forward_logp(model: torch.nn.Module, token_ids_T: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probability of each token but the first, from one plain forward pass."""
    tokens = torch.tensor(token_ids_T.astype(np.int64))[None]
    logp_TV = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, -1)
    return np.concatenate([[0.0], logp_TV.gather(1, tokens[0, 1:, None])[:, 0].numpy()])


def held_until_a_sync(url: str) -> Spoil:
    """Requests reach the server when the next sync begins, which then waits for their first tokens. A run that needs
    them earlier, or lets them end first, gets them after half a second."""
    begins = threading.Event()

    def spoil(path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if answer is None and path == GENERATE and json.loads(request)["sampling_params"]["max_tokens"] > 2:
            begins.wait(0.5)
        elif answer is None and path in ("/pause?mode=keep", "/pause?mode=abort"):
            before, deadline = sampled_by(url), time.monotonic() + 2.0
            begins.set()
            while sampled_by(url) == before and time.monotonic() < deadline:
                time.sleep(0.01)
        elif path == "/resume":
            begins.clear()
        return answer

    return spoil


@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
def test_every_stored_token_was_written_by_the_version_that_the_store_names(
    url: str, proxy: Proxy, rambling: Path, tmp_path: Path, in_flight: InFlight
) -> None:
    text = RUN.format(
        root=tmp_path, steps=STEPS, model=rambling, url=proxy.url, prompts=PROMPTS, group=GROUP, max_age=MAX_AGE,
        in_flight=in_flight,
    )  # fmt: skip
    proxy.spoil = held_until_a_sync(url)
    running.train(parse(text, "test"), Console(file=StringIO()), rewards=[even_digits])
    run = tmp_path / "run"
    models = {0: model_of(1)} | {
        int(folder.name.split("-")[-1]): AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        for folder in (run / "checkpoints").iterdir()
    }
    right, other, crossed, rollouts = list[float](), list[float](), 0, stored(run)
    for rollout, used in rollouts:
        (sequence,) = rollout.sequences
        crossed += len(sequence.spans) > 1
        for start, stop, version in sequence.spans:
            for model, apart in ((version, right), (max(version - 1, 0) if version else 1, other)):
                expected_T = forward_logp(models[model], sequence.token_ids_T, 0.9)[start:stop]
                apart.append(float(np.abs(sequence.behaviour_logp_T[start:stop] - expected_T).max()))
        assert used is None or used - sequence.spans[0].version <= MAX_AGE
    assert max(right) < CLOSE
    assert np.median(other) > 10 * CLOSE  # the check can tell versions apart
    assert (crossed > 0) == (in_flight != "drain")
    assert {version for rollout, _ in rollouts for _, _, version in rollout.sequences[0].spans} > {0, STEPS - 2}
    no_rollout_lost_or_used_twice(run, STEPS)
    assert all(row["sync/faults"] == 0 for row in read_metrics(run / "metrics.jsonl") if "sync/faults" in row)


def no_rollout_lost_or_used_twice(run: Path, steps: int) -> None:
    """Every step used whole groups, the first in the order of the task, each once. The account of tokens balances."""
    with closing(sqlite3.connect(run / "store.db")) as store:
        uses = Counter(id_ for (id_,) in store.execute("select rollout_id from uses"))
    groups = Counter(rollout.admission for rollout, used in stored(run) if used is not None)
    assert set(uses.values()) == {1}
    assert groups == Counter(dict.fromkeys(range(steps * PROMPTS), GROUP))
    for line in (run / "account.jsonl").read_text().splitlines():
        tokens = {name: count for name, count in json.loads(line).items() if name.startswith("tokens/")}
        assert tokens.pop("tokens/generated") == sum(tokens.values())

"""The simulator of step times: costs by hand, schedules with closed forms, a fit checked on rows it has not seen."""

import dataclasses

import numpy as np
import pytest

from benchmarks.simulate import splits
from benchmarks.simulator.calibration import ROWS, costs_with, errors, fit
from benchmarks.simulator.costs import Constants, Costs, Gpu, Model
from benchmarks.simulator.schedule import Split, Work, streaming, synchronous
from tests.command import ROOT, run_script

GPU = Gpu(speed=1e12, bandwidth=1e9, memory=1e9, link=1e9, network=1e8)
MODEL = Model(parameters=1e6, layers=10, hidden=1024, key_values=100)
CONSTANTS = Constants(
    launch=1e-3, cache_share=0.5, product_share=0.5, besides=1e-6, host=1e-4, sync_start=0.5, sync_share=0.5
)
COSTS = Costs(MODEL, GPU, CONSTANTS, recompute=False)


def test_costs_by_hand():
    # weights 2e6 / 1e9; the cache of 2 rows × 50 tokens × 2,000 bytes at half of 1e9; 10 layers of 1 ms
    assert COSTS.token(rows=2, context=50) == pytest.approx(0.002 + 0.0004 + 0.01)
    # 10,000 rows: products 2e6 × 1e4 / 1e12 take longer than reading the weights
    assert COSTS.token(rows=10_000, context=0) == pytest.approx(0.02 + 0.01)
    # two GPUs: half of it, and 20 all-reduces of 10 µs and 2 × 2 × 1,024 × 2 / 2 bytes
    assert COSTS.token(2, 50, gpus=2) == pytest.approx(0.0012 + 0.01 + 20 * (1e-5 + 4096e-9))
    # 1,000 tokens: products 6e6 × 1e3 / 5e11, besides 1e-6 × 10 × 1e3
    assert COSTS.learn(1000) == pytest.approx(0.012 + 0.01)
    assert COSTS.learn(10) == pytest.approx(10 * 1e-4)  # the host is slower
    assert COSTS.learn(1000, gpus=2) == pytest.approx(max(0.011, 3 * 2e6 / 2 / 1e9))
    assert COSTS.learn(1000, per_gpu=300) == pytest.approx(4 * 0.022 / 4)
    assert dataclasses.replace(COSTS, recompute=True).learn(1000) == pytest.approx(0.022 * 4 / 3)
    # 2e6 bytes at half of 1e8 for each of 2 GPUs
    assert COSTS.sync(gpus=2) == pytest.approx(0.5 + 0.02)


def test_memory_by_hand():
    # 850 MB minus 2 MB of weights, 2,000 bytes per token
    assert COSTS.rows(context=1000, gpus=1) == 424
    assert COSTS.engine_gpus(context=10_000) == 1  # 2 MB + 640 MB
    assert COSTS.engine_gpus(context=20_000) == 2  # 1.28 GB
    assert COSTS.learner_bytes(2, tokens=100) == pytest.approx(10e6 + 22 * 10 * 1024 * 100 + 2e5)


def test_micro_batches_are_halved_until_they_fit():
    """Two learners: 10 MB of state and 0.2 MB of a gathered layer. Each token keeps 225,280 bytes, of 900 MB: 3,949
    tokens fit, 32,768 / 8 = 4,096 do not, and 2,048 do."""
    assert COSTS.at_once(gpus=2, longest=100) == 2048
    assert COSTS.at_once(gpus=2, longest=3949) == 3949  # the longest text always has room
    assert COSTS.at_once(gpus=2, longest=3950) is None
    large = dataclasses.replace(COSTS, gpu=dataclasses.replace(GPU, memory=1e11))
    assert large.at_once(gpus=2, longest=100) == 32_768
    assert large.at_once(gpus=2, longest=40_000) == 40_000


def test_all_learners_wait_for_a_slow_one():
    """1,000 tokens on two GPUs are computed in 11 ms, and their weights gathered in 3 ms meanwhile."""
    assert COSTS.learn(1000, gpus=2, slow=3) == pytest.approx(3 * 0.011)
    assert COSTS.learn(10, slow=3) == pytest.approx(3 * 10 * 1e-4)  # its host is slow, too
    # 0.2 tokens would take 3e-6 s and their launch 1 ms: gathering takes 3 ms and is not slower
    assert COSTS.learn(0.2, gpus=2, slow=2) == pytest.approx(3 * 2e6 / 2 / 1e9)
    usual, slow = (synchronous(COSTS, EQUAL, Split(0, 2, slow=slow), updates=2).seconds for slow in (1.0, 3.0))
    assert slow - usual == pytest.approx(2 * COSTS.learn(8 * 110, 2))
    # a learner that never waits sets the pace of a streaming run
    costs = Costs(MODEL, dataclasses.replace(GPU, speed=1e9), dataclasses.replace(CONSTANTS, launch=1e-6), False)
    work = dataclasses.replace(EQUAL, prompt=0)
    outcome = streaming(costs, work, Split(2, 2, slow=1.5), v=5, max_age=8, updates=20)
    assert outcome.seconds == pytest.approx(1.5 * costs.learn(8 * 100, 2) + costs.sync(2) / 5, rel=1e-6)


def test_70_billion_parameters_fit_on_64_gpus_with_half_of_the_tokens():
    """32 learners, of 72 GB: 20 × 70.6e9 / 32 bytes of state, 1.765e9 of a layer, 2 × 8,192 × 80 for each token."""
    costs = costs_with(CONSTANTS, "h100", recompute=True)("70b")
    work = Work(4096, prompt=200, mean=2000, longest=16_184)
    assert costs.learner_bytes(32, 16_384) == pytest.approx(44.125e9 + 1.765e9 + 21.475e9, rel=1e-3)
    found = list(splits(costs, work, 64))
    assert [split.learners for split in found] == [32, 36, 40, 44, 48, 52]
    assert found[0].at_once == 16_384 and found[-1].at_once == 32_768
    assert not list(splits(costs, work, 16))


EQUAL = Work(responses=8, prompt=10, mean=100, longest=1000, spread=0.0)


def test_a_synchronous_step_of_equal_lengths_is_the_sum_of_its_parts():
    """Two engines with four rows each. Contexts grow from 10 to 110 tokens."""
    decoded = 4 * COSTS.prefill(10) + 100 * COSTS.token(4, 60)
    expected = decoded + COSTS.learn(8 * 110, 2) + COSTS.sync(2)
    outcome = synchronous(COSTS, EQUAL, Split(0, 2), updates=2)
    assert outcome.seconds == pytest.approx(expected)
    assert outcome.generating == pytest.approx(decoded / expected)


def test_a_slow_learner_never_waits():
    slow = Costs(MODEL, dataclasses.replace(GPU, speed=1e9), dataclasses.replace(CONSTANTS, launch=1e-6), False)
    work = dataclasses.replace(EQUAL, prompt=0)
    outcome = streaming(slow, work, Split(1, 2), v=5, max_age=8, updates=20)
    assert outcome.seconds == pytest.approx(slow.learn(8 * 100) + slow.sync(2) / 5, rel=1e-6)
    assert outcome.oldest <= 8


def test_slow_engines_always_work():
    """Two engines with room for 4 rows of 100 tokens each. The learner takes next to no time, and no sync is due."""
    fast = dataclasses.replace(CONSTANTS, host=1e-9, besides=1e-12)
    costs = Costs(MODEL, dataclasses.replace(GPU, memory=(2e6 + 4.5 * 2000 * 100) / 0.85), fast, recompute=False)
    work = dataclasses.replace(EQUAL, prompt=0)
    assert costs.rows(100, 1) == 4
    outcome = streaming(costs, work, Split(1, 2), v=1000, max_age=1000, updates=20)
    assert outcome.seconds == pytest.approx(100 * costs.token(4, 50), rel=1e-3)
    assert outcome.generating > 0.99


@pytest.mark.parametrize("max_age", [0, 1, 4])
def test_age_has_its_bound_and_buys_time(max_age):
    ragged = dataclasses.replace(EQUAL, responses=32, spread=1.0)
    young, old = (streaming(COSTS, ragged, Split(1, 2), 1, age) for age in (max_age, max_age + 4))
    assert young.oldest == max_age and old.oldest == max_age + 4
    assert old.seconds < young.seconds


def test_a_sample_of_engines_stands_for_all():
    """With equal lengths, 64 engines with 8 times the work and the same learners per token take as long as 8."""
    few, many = ((Work(8 * n, 10, 100, 1000, 0.0), Split(n, n)) for n in (8, 64))
    costs = Costs(MODEL, dataclasses.replace(GPU, link=1e15, network=1e15), CONSTANTS, recompute=False)
    assert streaming(costs, *many).seconds == pytest.approx(streaming(costs, *few).seconds)
    assert synchronous(costs, *many).seconds == pytest.approx(synchronous(costs, *few).seconds)


@pytest.mark.parametrize("half", [slice(None, None, 2), slice(1, None, 2)])
def test_constants_of_half_of_the_rows_predict_the_other_half(half):
    fitted = ROWS[half]
    others = tuple(row for row in ROWS if row not in fitted)
    ratio = np.exp(errors(others, fit(fitted)))
    assert len(others) == 7 and (abs(ratio - 1) < 0.25).all(), ratio


def test_the_command_prints_a_table():
    small = ("--model", "7b", "--gpus", 8, "--responses", 16, "--mean", 50)
    printed = []
    for given in ((), ("--slow", 20)):
        done = run_script(ROOT / "benchmarks" / "simulate.py", *small, *given)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("| streaming, v = ") == 4
        printed.append(float(done.stdout.split("| synchronous | ")[1].split(" |")[0]))
    assert printed[1] > printed[0]

"""What Ray gives ranks and engines of the GPUs. No GPU is needed: Ray counts as many as it is told."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from solera.cluster.actors import Actors
from solera.cluster.bundles import Beside
from solera.cluster.engines import EngineSpec
from solera.config import ClusterConfig
from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.run.ranking import beside_of
from solera.sharded.ranks import Ranks
from tests.cluster.hosts import seconds_until
from tests.cluster.ranks import Reusable
from tests.cluster.test_engines import SOURCE, Pool, publish

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of this process that believes in two GPUs. Whoever joins uses it, and leaves it running."""
    import ray

    ray.init(
        address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    yield ray
    ray.shutdown()


@dataclass(frozen=True)
class Watched(EngineSpec):
    """Its engines write down which GPUs they see."""

    folder: Path = Path()

    def open(self, number: int) -> InProcessEngine:
        (self.folder / str(number)).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        return super().open(number)


def test_a_rank_and_an_engine_share_each_gpu(ray, tmp_path):
    beside = beside_of(ClusterConfig(learners=2, engines=2, gpus_per_learner=0.5, gpus_per_engine=0.5))
    ranks = Ranks(Actors(2, Reusable, 60.0, None, gpus=0.5, beside=beside), 60.0)
    pool = Pool(Watched(SOURCE, torch.float32, 64, 1, gpus=0.5, folder=tmp_path), bundles=ranks.host.bundles)
    try:
        of_ranks = ranks.call("visible", [()] * 2)
        assert sorted(of_ranks) == ["0", "1"]
        assert [(tmp_path / str(number)).read_text() for number in range(2)] == of_ranks
        ranks.close()  # as after the death of a rank, when the engines still write
        publish(pool, 1)
        for _ in range(2):  # an engine that shares a GPU frees its memory in between
            assert len(pool.write(6).result(120)) == 6
    finally:
        ranks.close()
        pool.close()
    seconds_until(lambda: ray.available_resources().get("GPU") == 2.0, 30, "all GPUs are free")


def test_shares_of_more_than_a_gpu_are_placed_apart():
    assert beside_of(ClusterConfig(learners=2, engines=2)) is None
    assert beside_of(ClusterConfig(learners=2, engines=2, gpus_per_learner=0.6, gpus_per_engine=0.5)) is None
    assert beside_of(ClusterConfig(learners=2, gpus_per_learner=0.5, gpus_per_engine=0.5)) is None


@pytest.mark.parametrize(("gpus", "visible"), [(0.5, ["0", "0"]), (1.0, ["0", "1"])])
def test_each_rank_sees_its_gpu(ray, gpus, visible):
    ranks = Ranks(Actors(2, Reusable, 60.0, None, gpus=gpus), 60.0)
    assert sorted(ranks.call("visible", [()] * 2)) == visible
    assert ray.available_resources().get("GPU", 0.0) == 2.0 - 2 * gpus
    ranks.close()


def test_too_few_gpus_are_named_in_one_line(ray):
    said = (
        r"^cluster.learners is 3, but the Ray cluster has 4 CPUs and 2 GPUs and no room for that many ranks of one CPU "
        r"and 1 GPU each \(waited 1 s\): lower it, or add machines$"
    )
    with pytest.raises(SoleraError, match=said):
        Actors(3, Reusable, 1.0, None, gpus=1.0)
    said = r"many ranks of one CPU and 0.5 GPU each, with room for an engine of 0.5 GPU beside each \(waited 1 s\)"
    with pytest.raises(SoleraError, match=said):
        Actors(3, Reusable, 1.0, None, gpus=0.5, beside=Beside(1, 0.5))

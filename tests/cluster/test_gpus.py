"""What Ray gives ranks and engines of the GPUs. No GPU is needed: Ray counts as many as it is told."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from solera.cluster.actors import Actors
from solera.cluster.engines import EngineSpec
from solera.errors import SoleraError
from solera.sharded.ranks import Ranks
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


def test_engines_that_share_a_gpu_free_their_memory_and_go_on(ray):
    pool = Pool(EngineSpec(SOURCE, torch.float32, 64, 1, gpus=0.25))
    try:
        assert ray.available_resources()["GPU"] == 1.5
        publish(pool, 1)
        for _ in range(2):
            assert len(pool.write(6).result(120)) == 6
    finally:
        pool.close()

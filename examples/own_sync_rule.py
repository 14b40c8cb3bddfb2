"""A custom sync rule: the engine gets new weights after batch 1, 2, 4, 8, …, so most often at the start.

python examples/own_sync_rule.py [STEPS]
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

import solera


def at_powers_of_two(state: solera.SyncState, version: int, diagnosis: Mapping[str, float]) -> solera.SyncState:
    """Called after every batch with the learner's current version. `due` requests a sync before the next batch.

    `diagnosis` has the metrics `divergence/…`, and for judged batches also `probe/…` and `improvement/…`.
    """
    return replace(state, due=version >= max(1, 2 * state.engine_version))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = solera.Config(run=solera.RunConfig(steps=steps), evaluate=solera.EvaluateConfig(problems=100))
    result = solera.train(config, rule=at_powers_of_two)
    versions = sorted({int(row["sync/version"]) for row in result.metrics if "sync/version" in row})
    print(f"{result.accuracy_after:.0%} after; the engine had versions {versions}")

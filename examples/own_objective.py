"""An objective of one's own: a soft wall in place of a clip. The rest (advantage, mask, KL, aggregation) is composed as
for every other objective.

    python examples/own_objective.py [STEPS]
"""

import sys

import torch

import solera


def soft_wall(tokens: solera.Tokens) -> solera.Term:
    """A loss for each token, minimised: `−tanh(ρ − 1)·A`, whose gradient fades as the ratio leaves 1."""
    ratio_T = tokens.ratio("token")
    return solera.Term(-torch.tanh(ratio_T - 1) * tokens.advantage_T)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = solera.Config(run=solera.RunConfig(steps=steps), evaluate=solera.EvaluateConfig(problems=100))
    objective = solera.custom_objective(soft_wall, advantage="whiten", aggregation="sequence_mean")
    result = solera.train(config, objective=objective)
    print(f"{result.accuracy_before:.0%} before, {result.accuracy_after:.0%} after")

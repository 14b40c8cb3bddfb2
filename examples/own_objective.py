"""A custom objective: a soft limit on the ratio instead of a clip. The other parts (advantage, mask, KL,
aggregation) are the same as for built-in objectives.

    python examples/own_objective.py [STEPS]
"""

import sys

import torch

import solera


def soft_wall(tokens: solera.Tokens) -> solera.Term:
    """Return the loss of each token, `−tanh(ρ − 1)·A`. Its gradient fades as the ratio ρ moves away from 1."""
    ratio_T = tokens.ratio("token")
    return solera.Term(-torch.tanh(ratio_T - 1) * tokens.advantage_T)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = solera.Config(run=solera.RunConfig(steps=steps), evaluate=solera.EvaluateConfig(problems=100))
    objective = solera.custom_objective(soft_wall, advantage="whiten", aggregation="sequence_mean")
    result = solera.train(config, objective=objective)
    print(f"{result.accuracy_before:.0%} before, {result.accuracy_after:.0%} after")

"""A custom reward together with a built-in grader: a correct answer earns 1, each token after the third costs 0.05.

    python examples/own_reward.py [STEPS]

`examples/own_reward/` shows custom rewards without a script: data, reward functions and a config file.
"""

import sys

import solera


def brevity(rollout: solera.Rollout, row: dict) -> float:
    """`row` has the columns of the problem. Return `None` for a response whose reward is not known yet."""
    return -0.05 * max(0, rollout.length - 3)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = solera.Config(
        run=solera.RunConfig(steps=steps),
        reward=solera.RewardConfig(functions=("exact",)),
        evaluate=solera.EvaluateConfig(problems=100),
    )
    result = solera.train(config, rewards=[brevity])
    last = [row for row in result.metrics if "reward/brevity" in row][-1]
    print(f"{result.accuracy_after:.0%} right; brevity {last['reward/brevity']:.3f} a response")

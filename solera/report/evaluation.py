"""An evaluation as a table, and its comparisons as sentences."""

from rich.console import Console
from rich.table import Table

from solera.evaluate.attempts import Attempts
from solera.evaluate.evaluation import Evaluation, Examined
from solera.evaluate.statistics import Difference, Estimate


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the table, what was left out of it, and each comparison with the first model."""
    console.print(table(evaluation))
    for line in (*ungraded(evaluation), *comparison_lines(evaluation)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def table(evaluation: Evaluation) -> Table:
    quantities = shown(evaluation)
    first = evaluation.models[0]
    result = Table(caption=f"{len(first.greedy.problems)} held-out problems; in brackets 95 % intervals")
    result.add_column("model", overflow="fold")
    for name in (*quantities, "truncated", "tokens", "alike"):
        result.add_column(name, justify="right", overflow="fold")
    for model in evaluation.models:
        estimates = model.estimates()
        result.add_row(model.name, *(_cell(name, estimates[name]) for name in quantities), *_lengths(model))
        tasks = model.tasks()
        for task, part in tasks.items() if len(tasks) > 1 else ():
            own = part.estimates()
            label = f"  {task} ({len(part.greedy.problems)} problems)"
            result.add_row(label, *(_cell(name, own[name]) for name in quantities), "", "", "", style="dim")
    for run, extremes in evaluation.over_checkpoints().items():
        count = sum(model.candidate.run == run for model in evaluation.models)
        for word in ("max", "mean"):
            cells = [_number(name, getattr(extremes[name], word)) if name in extremes else "–" for name in quantities]
            result.add_row(f"{word} over {count} checkpoints of {run}", *cells, "", "", "", style="dim")
    return result


def shown(evaluation: Evaluation) -> list[str]:
    """Quantities with a column: rewards only where they say something else than the share that passed."""
    names = []
    for name in evaluation.models[0].quantities():
        if not name.startswith("reward") or any(_graded_finely(model, name) for model in evaluation.models):
            names.append(name)
    return names


def _graded_finely(model: Examined, name: str) -> bool:
    attempts = model.greedy if name == "reward greedy" else model.sampled
    return attempts is not None and attempts.reward_P() != attempts.rate_P()


def ungraded(evaluation: Evaluation) -> list[str]:
    """How many attempts the numbers leave out, where there are any."""
    lines = []
    for model in evaluation.models:
        if count := sum(attempts.ungraded for attempts in _kinds(model)):
            lines.append(f"{model.name}: {count} attempts came back without a reward and are left out")
    return lines


def comparison_lines(evaluation: Evaluation) -> list[str]:
    """One paragraph for each further model, one line for each quantity."""
    first, lines = evaluation.models[0].name, list[str]()
    for model, differences in evaluation.comparisons():
        lines.append(f"{model.name} against {first}, problem by problem:")
        for name in shown(evaluation):
            if (difference := differences[name]) is not None:
                lines.append(f"  {name}: {_sentence(name, difference, first, model.name)}")
    return lines


def _sentence(name: str, difference: Difference, first: str, second: str) -> str:
    estimate = difference.estimate
    value = _change(name, estimate.value)
    if estimate.low is None or estimate.high is None:
        return f"{value} on one problem: too few for an interval"
    word = "higher" if estimate.value > 0 else "lower"
    verdict = f"{word}: the interval excludes 0" if difference.excludes_zero else "undecided: the interval includes 0"
    limits = " to ".join(_change(name, limit).removesuffix(" points") for limit in (estimate.low, estimate.high))
    if name.startswith("reward"):
        return f"{value} ({limits}), {verdict}"
    solved = f"{difference.only_second} problems solved only by {second}, {difference.only_first} only by {first}"
    return f"{value} ({limits}), {verdict}; {solved}"


def _change(name: str, value: float) -> str:
    """With its sign; shares in percentage points."""
    return f"{value:+.3f}" if name.startswith("reward") else f"{100 * value:+.1f} points"


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return _number(name, estimate.value)
    low, high = (_number(name, limit).removesuffix("%") for limit in (estimate.low, estimate.high))
    return f"{_number(name, estimate.value)} ({low}–{high})"


def _number(name: str, value: float) -> str:
    return f"{value:.3f}" if name.startswith("reward") else f"{value:.1%}"


def _lengths(model: Examined) -> tuple[str, str, str]:
    """Of greedy and, after a stroke, of sampled attempts: cut off, tokens, share that are the most frequent one."""
    kinds = _kinds(model)
    truncated, alike = (" / ".join(f"{getattr(a, name):.1%}" for a in kinds) for name in ("truncated", "alike"))
    return truncated, " / ".join(f"{a.length:.1f}" for a in kinds), alike


def _kinds(model: Examined) -> list[Attempts]:
    return [model.greedy] if model.sampled is None else [model.greedy, model.sampled]

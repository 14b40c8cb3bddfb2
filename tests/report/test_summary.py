"""What a report says in words of a run's metrics."""

import json

from solera.report.run_folder import read_run
from solera.report.summary import _wasted


def test_waste_is_a_share_of_what_was_drawn_not_of_what_was_generated(tmp_path):
    """Drawn 60 + 20 + 20 tokens, of which 60 trained on and 30 of those stale; only 10 were generated."""
    rows = [
        {"step": 0, "tokens/generated": 10, "tokens/trained": 20, "waste/stale": 10, "waste/zero_variance": 20},
        {"step": 1, "tokens/generated": 0, "tokens/trained": 40, "waste/stale": 20, "waste/dropped": 20},
    ]
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _wasted(read_run(tmp_path)) == "stale 30%, dropped 20%, zero variance 20%"

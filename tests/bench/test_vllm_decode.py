"""`benchmarks/vllm_decode.py`: the real script with a tiny model and Solera's engine on a CPU."""

import re

from tests.command import ROOT, run_script

SCRIPT = ROOT / "benchmarks" / "vllm_decode.py"


def test_every_round_of_every_work_is_printed_and_the_model_can_be_read_again(tmp_path):
    small = ("--engine", "solera", "--device", "cpu", "--compute", "float32", "--prompt", "5", "--rounds", "1")
    done = run_script(SCRIPT, "model", "--write", "tiny", *small, "--work", "2x4x6", "1x2x3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rounds = re.findall(r"^solera, float32, (\w+), round 1: ([\d.]+) s, ([\d,]+) tokens/s", done.stdout, re.M)
    assert [work for work, _, _ in rounds] == ["2x4x6", "1x2x3"]
    seconds, speed = float(rounds[0][1]), float(rounds[0][2].replace(",", ""))
    assert abs(seconds - 2 * 4 * 6 / speed) <= 0.006  # seconds are printed with two digits
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files  # what vLLM reads

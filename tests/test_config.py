"""Config: read strictly, refused in one line with its place, written back complete."""

import dataclasses

import pytest

from solera.config import SAFE, Config, TaskConfig, check, dump, fields_of, load, override, parse
from solera.errors import SoleraError
from solera.folder.beginning import new_folder
from solera.objectives.table import resolve_config
from solera.run import running


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nsteps = 3\n[learn]", "f.toml:2: steps is outside any table; put it under [run]"),
        ("[steps]", "f.toml:1: unknown table [steps]"),
        ("path = 'x'", "f.toml:1: path is outside any table; put it under [model] or [task]"),
        ("[lern]\nlr = 1.0", "f.toml:1: unknown table [lern]; did you mean learn?"),
        (
            "\n\n[learn]\nlr = 1.0\nlearning_rat = 1",
            "f.toml:5: unknown field learn.learning_rat; use one of lr",
        ),
        ("[learn]\nlearning_rate = 1", "f.toml:2: unknown field learn.learning_rate; did you mean lr?"),
        (
            "num_generations = 4",
            "f.toml:1: num_generations is outside any table; Solera calls it group_size: put it under [collect]",
        ),
        ("[learn]\npases = 2", "f.toml:2: unknown field learn.pases; did you mean passes?"),
        ("[run]\nsteps = 2.5", "f.toml:2: run.steps is 2.5 but must be a whole number"),
        ("[run]\nsteps = true", "f.toml:2: run.steps is True but must be a whole number"),
        ("[run]\nname = 7", "f.toml:2: run.name is 7 but must be text"),
        ("[learn]\nlr = 'high'", "f.toml:2: learn.lr is 'high' but must be a number"),
        ("[learn]\nbetas = [0.9]", "f.toml:2: learn.betas is [0.9] but must be a list of 2 numbers"),
        ("[learn]\nbetas = [0.9, 'x']", "f.toml:2: learn.betas is [0.9, 'x'] but must be a number"),
        ("[sync]\nrule = 'often'", "f.toml:2: sync.rule is 'often' but must be one of every, never, adaptive"),
        (
            "[objective]\nzero_variance_mask = 1",
            "f.toml:2: objective.zero_variance_mask is 1 but must be true or false",
        ),
        ("run = 5", "f.toml:1: run is a table: write [run] and its fields below"),
        ("learn.lr = 'x'", "f.toml:1: learn.lr is 'x' but must be a number"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(text, says):
    with pytest.raises(SoleraError) as refusal:
        parse(text, "f.toml")
    assert str(refusal.value).startswith(says)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(SoleraError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run]\nsteps = = 3")
    with pytest.raises(SoleraError, match=r"bad\.toml: not valid TOML: .*line 2"):
        load(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SoleraError, match=r"binary\.toml:1: cannot be read: not UTF-8"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("sampling", {"top_p": 0.9}, "training needs the whole distribution: remove it"),
        ("sampling", {"temperature": 0.0}, "use at least 0.001"),
        ("sampling", {"max_tokens": 0}, "sampling.max_tokens is 0; it must be at least 1"),
        ("collect", {"group_size": 1}, "a single response cannot be compared with others: use 2 or more"),
        ("collect", {"offset": -1}, "collect.offset is -1; it must be at least 0"),
        ("store", {"url": "mysql://host/x"}, "USER@HOST/DATABASE, or remove it"),
        (
            "store",
            {"url": "postgresql://a:b@host/x"},
            "remove it, and set PGPASSWORD in the environment",
        ),
        ("draw", {"max_age": 8}, r"the run's own rollouts reach age 9 \(collect.offset \+ sync.period - 1\) before"),
        ("draw", {"order": "newest"}, "draw.order has no effect without draw.policy other than fresh"),
        ("draw", {"fresh": 0.2}, 'draw.fresh has no effect without draw.policy = "replay"'),
        ("draw", {"policy": "replay", "fresh": 1.0}, "it must be at least 0 and below 1"),
        (
            "draw",
            {"policy": "replay", "half_life": 3.0},
            'draw.half_life has no effect without draw.order = "priority"',
        ),
        ("draw", {"policy": "mixed"}, "draw.shares is empty"),
        ("draw", {"policy": "mixed", "shares": ("self",)}, "each must be ORIGIN=NUMBER with a number above 0"),
        ("draw", {"policy": "mixed", "shares": ("self=1", "self=2")}, "no origin twice"),
        ("draw", {"min_rewarded": 9}, "at most collect.group_size = 8"),
        ("draw", {"min_spread": -1.0}, "draw.min_spread is -1.0; it must be at least 0"),
        ("learn", {"minibatches": 33}, "groups are never split: use at most that many"),
        ("learn", {"grad_clip": 0.0}, "use a value above 0"),
        ("run", {"gpu_memory": 0.0}, "must be above 0"),
        ("learn", {"betas": (0.9, 1.0)}, r"both must be in \[0, 1\)"),
        ("learn", {"lr": 3.0}, "must be below 1, or AdamW diverges"),
        ("sync", {"rule": "never", "period": 5}, "sync.period has no effect with sync.rule = never"),
        ("sync", {"rule": "adaptive", "set_point": 0.1, "period": 5}, "no effect with sync.rule = adaptive"),
        ("sync", {"rule": "adaptive"}, "sync.set_point is unset"),
        ("sync", {"rule": "adaptive", "set_point": 1.5}, "tv_token needs a value between 0 and 1"),
        ("sync", {"rule": "adaptive", "set_point": 0.1, "v_min": 9, "v_max": 8}, "v_max not below v_min"),
        ("sync", {"set_point": 0.1, "v_max": 8}, "sync.set_point/v_max has no effect without sync.rule = adaptive"),
        ("sync", {"on_fault": "ignore"}, "must be one of stop, retry"),
        ("diagnose", {"every": -1}, "diagnose.every is -1; it must be at least 0"),
        ("sync", {"period": 0}, "sync.period is 0; it must be at least 1"),
        ("evaluate", {"top_p": 0.0, "temperature": 1.0}, r"must be in \(0, 1\]"),
        ("evaluate", {"top_p": 0.5}, "no effect on greedy evaluation"),
        ("evaluate", {"samples": 0}, "evaluate.samples is 0; it must be at least 1"),
        ("evaluate", {"samples": 4}, "greedy attempts at a problem are identical: set evaluate.temperature above 0"),
        ("run", {"name": "a/b"}, "use letters, digits"),
        ("run", {"name": ".."}, "use letters, digits"),
        ("run", {"steps": 0}, "run.steps is 0"),
    ],
)
def test_impossible_values_are_refused_in_one_line(section, values, says):
    with pytest.raises(SoleraError, match=says) as refusal:
        check(override(Config(), section, **values))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("--api_key", "sk-1"), "an API key, .* VLLM_API_KEY instead"),
        (("--seed=1", "--api_key=sk-1"), "an API key, .* VLLM_API_KEY instead"),
        (("--api-k", "sk-1"), "an API key, .* VLLM_API_KEY instead"),  # argparse completes the name
        (("--hf-token", "sk-1"), "a Hugging Face token, .* HF_TOKEN instead"),
        (("--hf_token=sk-1",), "a Hugging Face token, .* HF_TOKEN instead"),
        (("--hf_to=sk-1",), "a Hugging Face token, .* HF_TOKEN instead"),
    ],
)
def test_arguments_of_a_server_that_hold_a_secret_are_refused_without_repeating_it(arguments, instead):
    with pytest.raises(SoleraError, match=f"engine.args holds {instead}") as refusal:
        check(override(Config(), "engine", name="vllm", launch=1, args=arguments))
    assert "sk-1" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_arguments_of_a_server_that_hold_no_secret_pass():
    harmless = ("--api-server-count=2", "--hf_overrides", '{"api-key": 1}', "--hf-config-path=folder")
    check(override(Config(), "engine", name="vllm", launch=1, args=harmless))


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [("model", {"compile": False}, "set model.compile"), ("cluster", {"learners": 2}, "cluster.learners")],
)
def test_recorded_updates_need_compiled_layers_and_one_process(section, values, says):
    config = override(Config(), "learn", graphs=True)
    check(config)
    with pytest.raises(SoleraError, match=f"learn.graphs needs .*: remove it, or {says}"):
        check(override(config, section, **values))


def test_the_defaults_pass_and_survive_writing_and_reading():
    check(Config())
    assert parse(dump(Config()), "dump") == Config()
    odd = override(Config(), "run", name="a+b", root='with "quotes" and \\ and ü')
    odd = override(odd, "learn", lr=1e-7, betas=(0.5, 0.25))
    assert parse(dump(odd), "dump") == odd


def test_lists_of_any_length_are_read_and_written_back():
    text = '[reward]\nfunctions = ["exact", "a.py:f"]\nweights = [1, -0.5]'
    assert parse(text, "f").reward.functions == ("exact", "a.py:f")
    assert parse(text, "f").reward.weights == (1.0, -0.5)
    assert parse(dump(parse(text, "f")), "dump") == parse(text, "f")
    for line, says in [
        ("functions = 'exact'", "reward.functions is 'exact' but must be a list of texts"),
        ("functions = [1]", "must be text"),
        ("weights = ['a']", "must be a number"),
        ("weights = 1.0", "must be a list of numbers"),
    ]:
        with pytest.raises(SoleraError, match=f"f.toml:2: .*{says}"):
            parse(f"[reward]\n{line}", "f.toml")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"weights": (1.0,)}, "reward.weights has 1 numbers for 0 in reward.functions"),
        ({"functions": ("exact",), "weights": (float("nan"),)}, "must be a finite number"),
        ({"timeout": 0.0}, "use a number of seconds above 0"),
        ({"truncated": "drop"}, "one of grade, mask, penalise"),
        ({"truncated": "penalise", "truncated_reward": float("-inf")}, "must be a finite number"),
        ({"truncated": "mask", "truncated_reward": 0.5}, "has no effect without reward.truncated"),
        ({"overlong_buffer": -1}, "at least 0"),
        ({"overlong_buffer": 4, "overlong_penalty": -1.0}, "use a value above 0"),
    ],
)
def test_impossible_rewards_are_refused(values, says):
    with pytest.raises(SoleraError, match=says):
        check(override(Config(), "reward", **values))


ADAPTIVE = 'sync = { rule = "adaptive", set_point = 0.02, v_max = 9 }'


@pytest.mark.parametrize(
    ("sync", "reached", "says"),
    [
        ("sync = { period = 4 }", 5, r"5 \(collect.offset \+ sync.period - 1\) .*: raise it, or lower sync.period"),
        (ADAPTIVE, 10, r"10 \(collect.offset \+ sync.v_max - 1\) .*: raise it, or lower sync.v_max"),
    ],
)
def test_a_limit_of_replay_lets_the_runs_own_rollouts_pass(sync, reached, says):
    """Two batches wait. The engine's weights are up to 3 or 8 batches old when it writes."""
    config = parse(f'{sync}\ncollect = {{ offset = 2 }}\ndraw = {{ policy = "replay" }}', "test")
    check(override(config, "draw", max_age=reached))
    with pytest.raises(SoleraError, match=f"draw.max_age is {reached - 1}, .* reach age {says}"):
        check(override(config, "draw", max_age=reached - 1))


@pytest.mark.parametrize("mode", ["lock_step", "stream"])
def test_without_syncs_no_limit_of_replay_is_possible(mode):
    text = f'sync = {{ rule = "never" }}\ncollect = {{ mode = "{mode}" }}\ndraw = {{ policy = "replay", max_age = 99 }}'
    with pytest.raises(SoleraError, match=r"draw.max_age is 99, but with sync.rule = never .* remove one"):
        check(parse(text, "test"))


def test_every_field_has_help_and_every_room_a_sentence():
    import inspect
    import re

    for section in dataclasses.fields(Config):
        assert section.default_factory.__doc__
        body = inspect.getsource(section.default_factory)
        for field in dataclasses.fields(section.default_factory):
            assert re.search(rf'^    {field.name}: .*\n    """\S', body, re.MULTILINE), f"{section.name}.{field.name}"


def test_a_file_is_read_by_its_name_as_well(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 7\n")
    assert load(str(tmp_path / "run.toml")).run.steps == 7


def test_float16_without_a_gpu_is_refused_before_anything_is_written(tmp_path):
    config = parse(f'run = {{ root = "{tmp_path}", device = "cpu" }}\nmodel = {{ compute = "float16" }}', "test")
    with pytest.raises(SoleraError, match=r"model\.compute is float16, which needs a GPU"):
        running.train(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 3e-4),  # what docs/results.md found for the embedded model
        ("model = { path = 'owner/name' }", 1e-6),  # GRPO's default in TRL, and the rate of verl's examples
        ("model = { path = 'some/folder' }\nlora = { rank = 8 }", 1e-5),  # ten times as much for adapters
        ("model = { path = 'owner/name' }\nlearn = { lr = 3e-4 }", 3e-4),
        ("learn = { lr = 1e-6 }", 1e-6),
    ],
)
def test_the_learning_rate_depends_on_the_model_where_it_is_unset(text, rate):
    config = resolve_config(parse(text, "f.toml"))
    assert config.learn.lr == rate
    assert parse(dump(config), "written").learn.lr == rate


def test_every_setting_that_a_resume_may_change_is_one():
    assert set(SAFE) <= fields_of(Config()).keys()


def test_a_folder_that_exists_says_how_to_go_on_with_its_run(tmp_path):
    config = override(Config(), "run", root=str(tmp_path), name="x")
    (tmp_path / "x").mkdir()
    with pytest.raises(SoleraError, match=r"x already exists: choose another --run\.name, or remove it$"):
        new_folder(config)
    (tmp_path / "x/config.toml").touch()
    with pytest.raises(SoleraError, match=r"already exists: resume it \(solera train --resume \S+/x\), choose another"):
        new_folder(config)
    (tmp_path / "x/model").mkdir()
    with pytest.raises(
        SoleraError, match=r"already exists: extend it \(solera train --resume \S+/x --run\.steps N\), choose"
    ):
        new_folder(config)


def test_a_text_with_a_delete_character_reads_back_equal():
    """TOML allows it only as an escape."""
    config = Config(task=TaskConfig("jsonl", path="a", template="one\ntwo\x7f {prompt}\x1f"))
    assert parse(dump(config), "test") == config

"""Recipes: what is read, what is written back, and how faults are told."""

import dataclasses
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import Config, Reward
from stretto.prompts import read_prompts
from stretto.recipe import RecipeError, dump_recipe, load_recipe, settings_help, validate

REWARDS = '[[rewards]]\nname = "digits"\n'
RECIPES = Path(__file__).parents[1] / "recipes"
GOOD = Config(rewards=[Reward("digits")])


@pytest.fixture
def recipe(tmp_path):
    """recipe(text): the path of a recipe with that text and one reward."""

    def write(text, rewards=REWARDS):
        path = tmp_path / "recipe.toml"
        path.write_text(text + "\n" + rewards)
        return path

    return write


def faults_of(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, list(overrides))
    return caught.value.faults


def changed(**sections):
    """The good config with fields changed: changed(prompts={"samples": 1})."""
    new = {name: dataclasses.replace(getattr(GOOD, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(GOOD, **new)


def any_value(kind):
    """Any value of a field's type, whether or not it makes sense."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return st.lists(any_value(typing.get_args(kind)[0]), max_size=3)
    if dataclasses.is_dataclass(kind):
        fields = {name: any_value(inner) for name, inner in typing.get_type_hints(kind).items()}
        return st.builds(kind, **fields)
    scalars = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        type(None): st.none(),
    }
    return scalars[kind] if kind in scalars else st.one_of(any_value(inner) for inner in typing.get_args(kind))


@settings(deadline=None)
@given(any_value(Config))
def test_every_config_comes_back_equal_from_its_toml(tmp_path_factory, config):
    from stretto import strict
    from stretto.recipe import _read_toml

    path = tmp_path_factory.mktemp("recipes", numbered=True) / "recipe.toml"
    path.write_text(dump_recipe(config))
    assert strict.structure(_read_toml(path)) == (config, [])


def test_a_recipe_loads_with_its_defaults(recipe):
    assert load_recipe(recipe("[sampling]\nsteps = 8"), []) == changed(sampling={"steps": 8})


def test_the_resolved_recipe_loads_to_the_same_config(recipe, tmp_path):
    config = load_recipe(recipe("[optimizer]\nlr = 3\n[trained_steps]\nrule = 'random_window'\nstart_max = 4"), [])
    (tmp_path / "config.toml").write_text(dump_recipe(config))
    assert load_recipe(tmp_path / "config.toml", []) == config
    assert "start_max = 4" in dump_recipe(config)
    assert "start_max" not in dump_recipe(GOOD)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_recipe_loads(path):
    assert load_recipe(path, []).rewards


def test_an_override_wins_over_the_file(recipe):
    path = recipe("[sampling]\nsteps = 8\n[model]\ncheckpointing = true")
    words = "--sampling.steps 4 --trained_steps.rule list --trained_steps.steps 0 2 --model.checkpointing false"
    config = load_recipe(path, [*words.split(), "--optimizer.lr=1e-3", "--trained-steps.start-max", "None"])
    assert config.sampling.steps == 4
    assert config.trained_steps.steps == [0, 2]
    assert config.optimizer.lr == 1e-3
    assert config.model.checkpointing is False
    assert config.trained_steps.start_max is None


def test_an_override_can_mend_a_value_of_the_file(recipe):
    assert load_recipe(recipe("[prompts]\nsamples = 1"), ["--prompts.samples", "2"]).prompts.samples == 2


def test_all_faults_of_a_recipe_are_told_at_once(recipe):
    path = recipe(
        """
        [run]
        seeds = 1
        [sampling]
        steps = 3.7
        samples = 4
        dynamics = "flow_sd"
        [prompts]
        samples = 1
        [trained_step]
        rule = "list"
        [optimizer]
        warmup = true
        lr = 0
        """,
        '[[rewards]]\nnam = "digits"\n',
    )
    told = faults_of(path, "--sampling.stps", "3", "--run.threads", "x", "--rewards.0.weight", "2")
    expected = [
        "run.seeds: unknown key; did you mean run.seed?",
        "sampling.steps = 3.7: an integer is wanted",
        'sampling.dynamics = "flow_sd": one of "flow_sde", "dance_sde", "cps", "wan_flow_sde" is wanted; '
        'did you mean "flow_sde"?',
        "sampling.samples: unknown key; did you mean prompts.samples?",
        "rewards.0.nam: unknown key; did you mean rewards.name?",
        "optimizer.warmup = true: an integer is wanted",
        "trained_step: unknown key; did you mean trained_steps?",
        "--sampling.stps 3: unknown setting; did you mean sampling.steps?",
        "--run.threads x: an integer is wanted",
        "--rewards.0.weight 2: rewards are set in the recipe alone, as [[rewards]]",
        "prompts.samples = 1: a prompt group needs at least 2 samples",
        "optimizer.lr = 0.0: take more than 0",
    ]
    assert sorted(told) == sorted(expected)


def test_a_fault_of_reading_is_not_told_twice_as_a_fault_of_values(recipe):
    assert faults_of(recipe('[trained_steps]\nrule = "lst"\nsteps = [1, 2]')) == [
        'trained_steps.rule = "lst": one of "all_but_last", "fraction", "random_window", "progressive_window", '
        '"list" is wanted; did you mean "list"?'
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nfolder = 3", "run.folder = 3: a string is wanted"),
        ("run = 3", "run = 3: a table is wanted"),
        ("[tuning]\ntargets = 'to_q'", 'tuning.targets = "to_q": a list is wanted'),
        ("[trained_steps]\nsteps = [1, 'a']", 'trained_steps.steps.1 = "a": an integer is wanted'),
        ("[optimizer]\nlr = '1e-3'", 'optimizer.lr = "1e-3": a number is wanted'),
        ("[model]\ncheckpointing = 1", "model.checkpointing = 1: true or false is wanted"),
        (
            "[run]\nzzz = 1",
            "run.zzz: unknown key; known: folder, seed, iterations, resume, device, threads, tensorboard",
        ),
    ],
)
def test_a_wrong_type_is_told_with_the_type_that_is_wanted(recipe, text, told):
    assert faults_of(recipe(text)) == [told]


def test_malformed_toml_is_told_with_line_and_column(recipe):
    assert faults_of(recipe("[run]\nseed = = 1")) == ["malformed TOML: Invalid value (at line 2, column 8)"]


def test_a_path_that_is_no_recipe_is_told(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff'")
    assert faults_of(tmp_path / "none.toml") == ["there is no such file; give the path of a recipe in TOML"]
    assert faults_of(tmp_path) == ["is a folder; give the path of a recipe in TOML"]
    assert faults_of(tmp_path / "binary.toml") == ["is not UTF-8 text (byte 5), as TOML must be"]


def test_the_error_names_the_file_and_has_one_line_for_one_fault(recipe):
    path = recipe("[prompts]\nsamples = 1")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [])
    assert str(caught.value) == f"{path}: prompts.samples = 1: a prompt group needs at least 2 samples"


def test_the_good_config_has_no_fault():
    assert validate(GOOD) == []


WINDOW = {"rule": "random_window"}
WAN = {"adapter": "wan", "path": "wan"}
FAULTS = [
    ({"sampling": {"steps": 0}}, "sampling.steps = 0: take at least 1"),
    ({"sampling": {"steps": 1}}, "sampling.steps = 1: the last step is trained only if listed"),
    (
        {"trained_steps": {**WINDOW, "size": 10}},
        "trained_steps.size = 10: a window of a 10-step trajectory holds 1 to 9",
    ),
    (
        {"trained_steps": {**WINDOW, "start_max": 8}},
        "trained_steps.start_max = 8: a window of 2 in 10 steps starts in",
    ),
    ({"trained_steps": {"rule": "list"}}, "trained_steps.steps = []: list at least one step in 0..9"),
    ({"trained_steps": {"rule": "list", "steps": [10]}}, "trained_steps.steps = [10]: list distinct steps in 0..9"),
    ({"trained_steps": {"rule": "list", "steps": [1, 1]}}, "trained_steps.steps = [1, 1]: list distinct steps"),
    ({"trained_steps": {"steps": [1]}}, 'trained_steps.steps = [1]: is read by trained_steps.rule = "list" alone'),
    (
        {"trained_steps": {"rule": "list", "steps": [9]}, "sampling": {"dynamics": "cps"}},
        "trained_steps.steps = [9]: CPS adds no noise at the last step",
    ),
    (
        {"trained_steps": {"rule": "fraction", "fraction": 0.0}},
        "trained_steps.fraction = 0.0: take a share in (0, 1]",
    ),
    ({"sampling": {"noise_level": 0.0}}, "sampling.noise_level = 0.0: take more than 0"),
    (
        {"sampling": {"noise_level": 1.5, "dynamics": "cps"}},
        "sampling.noise_level = 1.5: CPS takes a level in (0, 1]",
    ),
    (
        {"sampling": {"dynamics": "cps"}, "objective": {"guard": True}},
        "objective.guard = true: CPS's log-prob has no 1/std^2",
    ),
    ({"advantage": {"best": 8, "worst": 5}}, "advantage.best = 8: best + worst = 13 of prompts.samples = 12"),
    (
        {"advantage": {"best": 2, "worst": 2}, "schedule": {"name": "two_sum"}},
        'schedule.name = "two_sum": two sums fold each sample before it is known which are kept',
    ),
    (
        {"schedule": {"name": "hybrid", "retain_last": 10}},
        "schedule.retain_last = 10: 9 steps are trained; retain 1 to 9 of them",
    ),
    ({"schedule": {"replay_batch": -1}}, "schedule.replay_batch = -1: take at least 0"),
    ({"optimizer": {"lr": -1.0}}, "optimizer.lr = -1.0: take more than 0"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan: take a finite number"),
    (
        {"optimizer": {"updates_per_rollout": 9}},
        "optimizer.updates_per_rollout = 9: each update takes a part of the prompts.per_iteration = 8 prompt groups",
    ),
    ({"model": {"adapter": "flux"}, "prompts": {"file": "p.txt"}}, 'model.path = "": flux loads a diffusers folder'),
    ({"model": {"adapter": "flux", "path": "flux"}}, 'prompts.file = "": flux has no prompts of its own'),
    ({"model": {"path": "x"}}, 'model.path = "x": the base of digits ships with the package'),
    (
        {"model": {**WAN, "frames": 8}, "prompts": {"file": "p"}},
        "model.frames = 8: wan makes 4k + 1 frames; take 9 or 13",
    ),
    ({"model": {"frames": 5}}, "model.frames = 5: digits makes single images"),
    ({"tuning": {"method": "full", "start_from": "lora"}}, 'tuning.start_from = "lora": it is a LoRA to start from'),
    ({"run": {"device": "gpu"}}, 'run.device = "gpu": take auto, cpu, cuda or cuda:N'),
    ({"run": {"device": "cuda:100"}}, 'run.device = "cuda:100": take auto, cpu, cuda or cuda:N (N to 99)'),
    ({"run": {"threads": 1025}}, "run.threads = 1025: take 0 to 1024 (0 leaves torch's own choice)"),
    ({"tuning": {"rank": 65537}}, "tuning.rank = 65537: take 1 to 65536"),
    ({"tuning": {"alpha": 2**62}}, f"tuning.alpha = {2**62}: take 1 to 65536"),
    (
        {"evaluation": {"patience": 2, "every": 0}},
        "evaluation.patience = 2: it counts evaluations, and evaluation.every = 0 makes none",
    ),
    ({"run": {"seed": -1}}, "run.seed = -1: take a seed in 0..2**63 - 1"),
    ({"ema": {"decay": 1.0}}, "ema.decay = 1.0: take a decay in [0, 1)"),
    ({"evaluation": {"prompts": ["0", " "]}}, "evaluation.prompts = ['0', ' ']: a prompt may not be blank"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep = 0: take at least 1"),
]


@pytest.mark.parametrize(("sections", "told"), FAULTS, ids=[told.split(":")[0] for _, told in FAULTS])
def test_a_value_that_cannot_run_is_told_with_the_way_out(sections, told):
    faults = validate(changed(**sections))
    assert len(faults) == 1
    assert faults[0].startswith(told)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([], 'rewards is empty: name at least one, as [[rewards]] with name = "..."'),
        ([Reward()], 'rewards.0.name = "": name a shipped reward'),
        ([Reward("a"), Reward("a")], 'rewards.1.name = "a": listed twice'),
        ([Reward("a", 0.0)], "rewards: every weight is 0"),
        ([Reward("a", float("inf"))], "rewards.0.weight = inf: take a finite number"),
    ],
)
def test_rewards_that_cannot_score_are_told(rewards, told):
    (fault,) = validate(dataclasses.replace(GOOD, rewards=rewards))
    assert fault.startswith(told)


@settings(deadline=None)
@given(any_value(Config))
def test_validate_tells_faults_of_any_config_and_never_fails(config):
    assert all(": " in fault for fault in validate(config))


def test_every_number_of_the_config_has_a_bound_or_a_rule_of_its_own():
    from stretto import strict
    from stretto.faults import _BOUNDS

    ruled = {"sampling.noise_level", "trained_steps.start_max", "schedule.retain_last", "rewards.weight"}
    numbers = {key for key, kind in strict.field_types().items() if kind in (int, float, int | None)}
    assert numbers - ruled <= _BOUNDS.keys() <= strict.field_types().keys()


def test_the_help_lists_every_setting_with_its_sentence():
    text = settings_help()
    assert "--trained_steps.move_every" in text
    assert "M, the samples of one prompt group" in text


def test_a_text_file_has_one_prompt_a_line(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n\n  a dog \na cat\n")
    assert read_prompts(tmp_path / "prompts.txt").texts == ["a cat", "a dog", "a cat"]


def test_json_lines_carry_columns_for_the_rewards(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "target": "A"}\n{"prompt": "b", "target": null}\n')
    prompts = read_prompts(tmp_path / "prompts.jsonl")
    assert (prompts.texts, prompts.metadata) == (["a", "b"], {"target": ["A", None]})


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_an_empty_prompt_file_is_refused(tmp_path, name):
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(ValueError, match="is empty: write one prompt a line"):
        read_prompts(tmp_path / name)


def test_every_bad_line_of_a_prompt_file_is_named(tmp_path):
    lines = ['{"prompt": "a", "x": 1}', "{", '{"text": "b"}', '{"prompt": 3, "x": 1}', '{"prompt": "c"}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"prompts\.jsonl") as caught:
        read_prompts(tmp_path / "prompts.jsonl")
    message = str(caught.value)
    assert "line 2: not JSON" in message
    assert 'line 3: an object with "prompt" is wanted' in message
    assert 'line 4: "prompt" is 3; text is wanted' in message
    assert "line 5: its keys differ from the first line's in: x" in message


def test_a_byte_order_mark_is_no_part_of_a_prompt_or_a_recipe(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n", encoding="utf-8-sig")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    (tmp_path / "recipe.toml").write_text("[run]\nseed = 3\n" + REWARDS, encoding="utf-8-sig")
    assert read_prompts(tmp_path / "prompts.txt").texts == ["a cat"]
    assert read_prompts(tmp_path / "prompts.jsonl").texts == ["a"]
    assert load_recipe(tmp_path / "recipe.toml", []).run.seed == 3


def test_a_prompt_file_that_is_a_folder_or_not_there_names_the_key_and_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'prompts\.file = "\." is a folder: name a text file'):
        read_prompts(Path("."))
    with pytest.raises(ValueError, match=rf'prompts\.file = "p\.txt": .* \(looked for {tmp_path}/p\.txt\)'):
        read_prompts(Path("p.txt"))
    with pytest.raises(RecipeError, match=rf"there is no such file \(looked for {tmp_path}/none\.toml\)"):
        load_recipe(Path("none.toml"), [])

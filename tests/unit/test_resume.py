"""What a run may change when it goes on from a checkpoint, what it may not, and that nothing is written before."""

import hashlib
import json
import shutil
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jobs.train
import jobs.train_reward
from jobs.runs import find_start
from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.config import Config
from rlhf.errors import CheckpointError, ConfigError
from rlhf.recipes import load_config
from rlhf.resume import RULES, check_resume, describe_run, rule_of, tokenizer_fingerprint
from rlhf.reward_config import RewardTrainingConfig
from tests.fakes import save

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "runs" / "x" / "checkpoints" / "step-000109"


def leaf_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every key that a recipe can set; dictionaries and lists count as one."""
    hints = typing.get_type_hints(schema)
    for spec in fields(schema):
        kind = hints[spec.name]
        if isinstance(kind, types.UnionType):
            kind = next(kind for kind in typing.get_args(kind) if kind is not types.NoneType)
        if is_dataclass(kind):
            yield from leaf_keys(kind, f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name


KEYS = {key for schema in (Config, RewardTrainingConfig) for key in leaf_keys(schema)}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_has_a_rule(key: str) -> None:
    assert rule_of(key) is not None, f"may {key} differ when a run is resumed? Say so in RULES of rlhf/resume.py"


def test_every_rule_is_of_a_key_that_exists() -> None:
    named = [key for rule in RULES for key in rule.keys.split()]
    assert len(named) == len(set(named)), "no key has two rules"
    sections = {key.rpartition(".")[0] + ".*" for key in KEYS}
    assert set(named) <= KEYS | sections


@pytest.fixture
def build(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """Builds a configuration from a tiny recipe: ``build('num_steps=3')``."""

    def build(*overrides: str, recipe: str = "grpo_tiny") -> Any:
        schema = RewardTrainingConfig if recipe == "reward_tiny" else Config
        fixed = [f"model.path={tiny_model_dir}", f"run_dir={tmp_path / 'run'}", "data.date=2026-01-31"]
        fixed += ["data.task_args.num_rows=20"] if recipe != "ppo_rm_tiny" else [f"reward.model.path={tiny_model_dir}"]
        return load_config(ROOT / "conf" / f"{recipe}.yaml", [*fixed, *overrides], schema)

    return build


def described(config: Any, tokenizer: Any, data: str = "d0") -> dict[str, Any]:
    run = describe_run(config, tokenizer, data=data, num_steps=getattr(config, "num_steps", 7))
    return json.loads(json.dumps(run))


def resumed(old: Any, new: Any, tokenizer: Any, **state: Any) -> str:
    """The line on resuming ``old`` as ``new``."""
    return check_resume(DIRECTORY, {**described(old, tokenizer), **state}, described(new, tokenizer))


def refusal(old: Any, new: Any, tokenizer: Any, **state: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resumed(old, new, tokenizer, **state)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("or start over with checkpoint.resume=none and another name or run_dir")
    return message


def test_what_may_change_is_told_in_one_line(build: Any, tiny_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    old = build("num_steps=300", "learner.optimizer.learning_rate=1e-6", "data.system_prompt=null")
    assert resumed(old, old, tiny_tokenizer) == "resuming from runs/x/checkpoints/step-000109 (of 300)"
    new = build(
        *("num_steps=5000", "learner.optimizer.learning_rate=5e-7", "rollout.autoscale={max: 4}", "rollout.stop=[END]"),
        *("learner.num_ranks=4", "learner.zero_stage=1", "rollout.num_workers=3"),
        "checkpoint.resume=runs/x/checkpoints/step-000109",
    )
    assert resumed(old, new, tiny_tokenizer) == (
        "resuming from runs/x/checkpoints/step-000109 (of 300); changed: num_steps 300 -> 5000, "
        "learner.num_ranks 2 -> 4, learner.zero_stage null -> 1, learner.optimizer.learning_rate 1e-06 -> 5e-07, "
        'rollout.num_workers 1 -> 3, rollout.stop [] -> ["END"], rollout.autoscale.min unset -> 1, '
        "rollout.autoscale.max unset -> 4, rollout.autoscale.wait_fraction unset -> 0.25, "
        "rollout.autoscale.idle_fraction unset -> 0.5, rollout.autoscale.patience_steps unset -> 3"
    )


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("seed=3", "seed 0 -> 3 (the order of the data and all samples depend on it)"),
        ("model.dtype=bfloat16", "model.dtype auto -> bfloat16"),
        ("algorithm.loss_type=dr_grpo", "algorithm.loss_type dapo -> dr_grpo"),
        ("algorithm.group_size=2", "algorithm.group_size 8 -> 2 (steps, schedule and data position are counted in"),
        ("algorithm.num_minibatches=2", "algorithm.num_minibatches 1 -> 2"),
        ("learner.optimizer.betas=[0.9, 0.99]", "learner.optimizer.betas [0.9, 0.95] -> [0.9, 0.99]"),
        ("data.shuffle=false", "data.shuffle true -> false"),
    ],
)
def test_what_may_not_change_is_named(build: Any, tiny_tokenizer: Any, override: str, difference: str) -> None:
    message = refusal(build(), build(override, "num_steps=7"), tiny_tokenizer)
    assert f"step-000109 belongs to another run: {difference}" in message
    assert "; also changed: num_steps 25 -> 7; restore the old values" in message


OWN = """
def advantage(inputs, a=0):
    return inputs.rewards

def loss(inputs, b=0):
    return -inputs.logprobs

def reward(completions):
    return [0.0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("recipe", "models"), [("grpo_tiny", {"model"}), ("ppo_tiny", {"model", "critic"}), ("reward_tiny", {"model"})]
)
def test_only_models_that_are_trained_are_recorded(
    build: Any, tiny_tokenizer: Any, recipe: str, models: set[str]
) -> None:
    recorded = described(build(recipe=recipe), tiny_tokenizer)["fingerprints"]
    assert recorded.keys() == {"tokenizer", "data"} | models


def test_the_user_s_own_objective_is_kept_and_a_changed_file_is_told(
    build: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = [f"algorithm.advantage={file}:advantage", f"algorithm.loss={file}:loss", "algorithm.loss_kwargs={b: 1}"]
    own.append(f"reward.functions=[{{path: even_tokens}}, {{path: {file}:reward}}]")
    old = described(build(*own), tiny_tokenizer)
    same = described(build(*own, "algorithm.advantage=mine.py:advantage"), tiny_tokenizer)
    assert "changed" not in check_resume(DIRECTORY, old, same), "the same file, from here"
    (tmp_path / "moved.py").write_text(OWN)
    moved = described(build(*own, "algorithm.loss=moved.py:loss"), tiny_tokenizer)
    assert check_resume(DIRECTORY, old, moved).endswith(f"; changed: algorithm.loss {file}:loss -> moved.py:loss")
    older = {name: value for name, value in old.items() if name != "sources"}  # it cannot be told what it was
    with pytest.raises(CheckpointError, match=rf"another run: algorithm\.loss {file}:loss -> moved\.py:loss \("):
        check_resume(DIRECTORY, older, moved)
    message = refusal(build(*own), build(*own, "algorithm.loss=moved.py:advantage"), tiny_tokenizer)
    assert f"algorithm.loss {file}:loss -> moved.py:advantage (" in message, "another function of the same file"
    file.write_text(OWN + "# another comment")
    edited = described(build(*own, "algorithm.loss_kwargs={b: 2}"), tiny_tokenizer)
    assert check_resume(DIRECTORY, old, edited).endswith(
        '; changed: algorithm.loss_kwargs {"b": 1} -> {"b": 2}, the source of algorithm.advantage, '
        "the source of algorithm.loss, the source of reward.functions[1]"
    )
    message = refusal(build(own[0]), build(own[1]), tiny_tokenizer)
    assert f"algorithm.advantage {file}:advantage -> null (the optimizer's moments and the critic come from" in message
    assert f"algorithm.loss null -> {file}:loss (" in message


def test_a_checkpoint_from_before_a_key_that_is_not_used_is_taken(
    build: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    now = described(build(f"reward.functions=[{{path: {tmp_path / 'mine.py'}:reward}}]"), tiny_tokenizer)
    old = json.loads(json.dumps(now))
    del old["config"]["algorithm"]["loss"], old["sources"]
    assert "changed" not in check_resume(DIRECTORY, old, now)
    del old["config"]["checks"]["probe"]
    assert "changed: checks.probe unset -> true" in check_resume(DIRECTORY, old, now), "the next key is compared"


def test_values_that_json_has_not_are_recorded_and_compared_as_text(build: Any, tiny_tokenizer: Any) -> None:
    """YAML has bytes: ``!!binary aGk=``."""
    config = build()
    old, new = (
        replace(config, data=replace(config.data, chat_template_kwargs={"key": value})) for value in (b"hi", b"ho")
    )
    recorded = described(old, tiny_tokenizer)
    assert recorded["config"]["data"]["chat_template_kwargs"] == {"key": "b'hi'"}
    assert "changed" not in check_resume(DIRECTORY, recorded, described(old, tiny_tokenizer))
    change = """changed: data.chat_template_kwargs {"key": "b'hi'"} -> {"key": "b'ho'"}"""
    assert check_resume(DIRECTORY, recorded, described(new, tiny_tokenizer)).endswith(change)


def test_all_differences_are_named_at_once(build: Any, tiny_tokenizer: Any) -> None:
    message = refusal(build(), build("seed=1", "algorithm.group_size=4"), tiny_tokenizer)
    assert "seed 0 -> 1 (" in message and "algorithm.group_size 8 -> 4 (" in message
    assert "batches of that size); restore the old values" in message, "nothing else changed"
    message = refusal(build(), build("seed=1", "num_steps=7", "rollout.top_k=3"), tiny_tokenizer)
    assert "; also changed: num_steps 25 -> 7, rollout.top_k -1 -> 3; restore the old values" in message


def test_a_critic_s_settings_matter_where_there_is_one(build: Any, tiny_tokenizer: Any) -> None:
    betas = "critic.optimizer.betas=[0.8, 0.9]"
    assert "changed" not in resumed(build(), build(betas), tiny_tokenizer)
    assert "changed: rollout.top_k -1 -> 3" in resumed(build(), build(betas, "rollout.top_k=3"), tiny_tokenizer)
    message = refusal(build(recipe="ppo_tiny"), build(betas, recipe="ppo_tiny"), tiny_tokenizer)
    assert "critic.optimizer.betas [0.9, 0.95] -> [0.8, 0.9] (the optimizer's moments were computed with it" in message


def test_a_critic_of_another_shape_is_another_run_s(
    build: Any, tiny_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"rope_theta": 5.0}))
    old, new = build(recipe="ppo_tiny"), build(f"critic.path={other}", recipe="ppo_tiny")
    assert "(config.json of critic.path)" in refusal(old, new, tiny_tokenizer)
    whole = described(old, tiny_tokenizer)
    without = described(old, tiny_tokenizer)
    critic = without["fingerprints"].pop("critic")
    for one, other, change in ((whole, without, f"{critic} -> unset"), (without, whole, f"unset -> {critic}")):
        with pytest.raises(CheckpointError, match=rf": critic {change} \(config\.json of critic\.path\); restore"):
            check_resume(DIRECTORY, one, other)


def test_an_adapted_beta_is_the_checkpoint_s(build: Any, tiny_tokenizer: Any) -> None:
    old, new = (build(f"algorithm.beta={beta}", recipe="ppo_tiny") for beta in (0.1, 0.2))
    assert "changed: algorithm.beta 0.1 -> 0.2" in resumed(old, new, tiny_tokenizer, algorithm={})
    message = refusal(old, new, tiny_tokenizer, algorithm={"beta": 0.13})
    assert "algorithm.beta 0.1 -> 0.2 (the checkpoint holds the beta of the KL controller)" in message


def test_a_key_of_another_version_is_not_passed_over(build: Any, tiny_tokenizer: Any) -> None:
    config = build()
    old = described(config, tiny_tokenizer)
    old["config"]["algorithm"]["forgotten"] = 1
    with pytest.raises(CheckpointError, match=r"algorithm\.forgotten 1 -> unset \(a key without a rule"):
        check_resume(DIRECTORY, old, described(config, tiny_tokenizer))
    del old["config"]["algorithm"]["forgotten"], old["config"]["checks"]["probe"]
    assert "changed: checks.probe unset -> true" in check_resume(DIRECTORY, old, described(config, tiny_tokenizer))


def test_a_model_directory_may_move_but_not_change(
    build: Any, tiny_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    old = build()
    new = replace(old, model=replace(old.model, path=str(moved)))
    assert f"changed: model.path {tiny_model_dir} -> {moved}" in resumed(old, new, tiny_tokenizer)
    monkeypatch.chdir(moved.parent)
    relative = replace(new, model=replace(new.model, path="moved"))
    assert "changed" not in resumed(new, relative, tiny_tokenizer), "the same directory, from here"
    shape = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(shape | {"transformers_version": "0"}))
    resumed(old, new, tiny_tokenizer)
    (moved / "config.json").write_text(json.dumps(shape | {"rope_theta": 5.0}))
    assert "(config.json of model.path)" in refusal(old, new, tiny_tokenizer)


def test_tokenizer_and_data_are_compared_by_fingerprint(build: Any, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    config = build()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    before = described(config, tokenizer)
    assert described(config, AutoTokenizer.from_pretrained(tiny_model_dir)) == before
    tokenizer.chat_template += " "
    retemplated = described(config, tokenizer)
    tokenizer.add_tokens(["<think>"])
    longer = described(config, tokenizer)
    for now in (retemplated, longer):
        assert before["fingerprints"]["tokenizer"] != now["fingerprints"]["tokenizer"]
        with pytest.raises(CheckpointError, match=r"tokenizer \w{16} -> \w{16} \(vocabulary, added tokens and chat"):
            check_resume(DIRECTORY, before, now)
    assert longer["fingerprints"]["tokenizer"] != retemplated["fingerprints"]["tokenizer"]
    other = build("data.system_prompt=Be brief.")
    now = described(other, AutoTokenizer.from_pretrained(tiny_model_dir), data="d1")
    expected = r"data d0 -> d1 \(the prompts.*; also changed: data\.system_prompt null -> Be brief\.; restore"
    with pytest.raises(CheckpointError, match=expected):
        check_resume(DIRECTORY, before, now)


class Token:
    """One of a tokenizer's added tokens, of which only the description counts."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"<{self.text}>"


def test_a_tokenizer_s_fingerprint_follows_each_of_its_parts() -> None:
    def of(**parts: Any) -> str:
        own = {"vocab": {"b": 1, "a": 0}, "added": {2: Token("x")}, "special": {"bos": Token("s")}, "template": "t"}
        part = own | parts
        return tokenizer_fingerprint(
            SimpleNamespace(
                get_vocab=lambda: part["vocab"],
                added_tokens_decoder=part["added"],
                special_tokens_map=part["special"],
                chat_template=part["template"],
            )  # type: ignore[arg-type]
        )

    as_json = '[{"a": 0, "b": 1}, {"2": "<x>"}, {"bos": "<s>"}, "t"]'
    assert of() == hashlib.sha256(as_json.encode()).hexdigest()[:16], "as the checkpoints of earlier versions have it"
    others = [
        of(vocab={"a": 1, "b": 0}),
        of(added={2: Token("y")}),
        of(added={3: Token("x")}),
        of(special={}),
        of(template=None),
    ]
    assert len({of(), *others}) == 6


def test_a_model_s_fingerprint_leaves_out_where_it_came_from(
    build: Any, tiny_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    shape = json.loads((other / "config.json").read_text())
    config = build(f"model.path={other}")
    known = described(config, tiny_tokenizer)["fingerprints"]
    assert len(known["model"]) == 16
    origin = {"_name_or_path": "a/b", "_commit_hash": "c", "transformers_version": "0"}
    (other / "config.json").write_text(json.dumps(dict(reversed(list((shape | origin).items())))))
    assert described(config, tiny_tokenizer)["fingerprints"] == known, "nor does the order of its keys count"
    (other / "config.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        described(config, tiny_tokenizer)
    assert str(caught.value).startswith(f"model.path={other}: has no readable config.json (")
    critic = build(f"critic.path={other}", recipe="ppo_tiny")
    with pytest.raises(ConfigError) as caught:
        described(critic, tiny_tokenizer)
    assert str(caught.value).startswith(f"critic.path={other}: has no readable config.json (")


# ---- through the jobs, which stop before Ray starts


def fail_at_ray(*_: Any) -> Any:
    raise NotImplementedError("Ray would start now")


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: Any) -> None:
    for module in (jobs.train, jobs.train_reward):
        monkeypatch.setattr(module, "connect", fail_at_ray)


def start(config: Any) -> None:
    if isinstance(config, Config):
        jobs.train.train(config)
    else:
        jobs.train_reward.train_reward(config)


def leave_checkpoint(config: Any, step: int) -> dict[Path, bytes]:
    """Starts a run up to where Ray would start and leaves a checkpoint as of that step; what is in its directory."""
    with pytest.MonkeyPatch.context() as patched:
        stores = []
        patched.setattr(
            jobs.train,
            "CheckpointStore",
            lambda run_dir, **_: stores.append(CheckpointStore(run_dir, keep=1)) or stores[0],
        )
        patched.setattr(jobs.train_reward, "CheckpointStore", jobs.train.CheckpointStore)
        with pytest.raises(NotImplementedError):
            start(config)
    save(stores[0], step)  # the run that held the directory has ended
    summary = {"status": "completed", "steps": step}
    Path(config.run_dir, "summary.json").write_text(json.dumps(summary))
    return contents(config)


def contents(config: Any) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(config.run_dir).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("recipe", "longer", "step", "of"), [("grpo_tiny", "num_steps", 50, 25), ("reward_tiny", "num_epochs", 3, 1)]
)
def test_a_finished_run_says_so_and_leaves_all_files_alone(
    build: Any, capsys: Any, recipe: str, longer: str, step: int, of: int
) -> None:
    config = build(recipe=recipe)
    before = leave_checkpoint(config, step)
    with pytest.raises(ConfigError) as caught:
        start(config)
    assert str(caught.value) == (
        f"{config.run_dir} already holds step {step} of {of}; raise {longer}, change name, or set "
        "checkpoint.resume=none"
    )
    assert contents(config) == before
    assert "resuming" not in capsys.readouterr().out
    with pytest.raises(NotImplementedError):
        start(build(f"{longer}=60", recipe=recipe))
    assert f"step-{step:06d} (of {of}); changed: {longer}" in capsys.readouterr().out
    with pytest.raises(NotImplementedError):
        start(build("checkpoint.resume=none", recipe=recipe))


def test_a_run_that_ended_before_its_model_was_written_may_still_write_it(build: Any) -> None:
    config = build("num_steps=5")
    leave_checkpoint(config, 5)
    with pytest.raises(ConfigError, match="already holds step 5 of 5"):
        start(config)
    summary = Path(config.run_dir, "summary.json")
    for outcome in ({"status": "interrupted", "steps": 5}, {"status": "completed", "steps": 4}):
        summary.write_text(json.dumps(outcome))
        with pytest.raises(NotImplementedError):
            start(config)
    summary.unlink()
    with pytest.raises(NotImplementedError):
        start(config)


@pytest.mark.parametrize(
    ("recipe", "override", "difference"),
    [
        ("grpo_tiny", "seed=1", "seed 0 -> 1"),
        ("grpo_tiny", "data.task_args.num_rows=19", "data "),
        ("reward_tiny", "batch_pairs=4", "batch_pairs 64 -> 4"),
        ("reward_tiny", "data.max_tokens=3", "data "),
    ],
)
def test_another_run_is_refused_before_anything_is_written(
    build: Any, recipe: str, override: str, difference: str
) -> None:
    config = build(recipe=recipe)
    before = leave_checkpoint(config, 0)
    with pytest.raises(CheckpointError, match=f"belongs to another run: {difference}"):
        start(build(override, recipe=recipe))
    assert contents(config) == before


def test_a_checkpoint_that_says_nothing_of_its_run_is_refused(build: Any) -> None:
    config = build()
    save(CheckpointStore(config.run_dir, keep=1), 3)
    with pytest.raises(CheckpointError, match=r"lacks the configuration of its run .*checkpoint\.resume=none"):
        start(config)


def test_a_run_keeps_the_date_on_which_it_began(build: Any) -> None:
    config = build("data.date=null")
    store = CheckpointStore(config.run_dir, keep=1)
    begun, state = find_start(config, store)
    assert begun.data.date == date.today().isoformat() and state is None
    config = build()  # begun on a day in January
    leave_checkpoint(config, 4)
    assert read_state(store.path(4))["config"]["data"]["date"] == "2026-01-31"
    resumed_later, state = find_start(build("data.date=null"), store)
    assert resumed_later.data.date == "2026-01-31" and state is not None
    given, _ = find_start(build("data.date=2026-02-01"), store)
    assert given.data.date == "2026-02-01"
    saved = load_config(Path(config.run_dir, "config.yaml"))
    assert saved.data.date == "2026-01-31"

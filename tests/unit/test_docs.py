"""What the documents name exists: keys of the configuration, files, and the targets of links."""

import re
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import Config
from rlhf.reward_config import RewardTrainingConfig

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCHEMAS = (Config, RewardTrainingConfig)
SECTIONS = {field.name for schema in SCHEMAS for field in fields(schema)}
KEY = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_]\w*)+")
FILE = re.compile(r"(?<![\w./-])(?:rlhf|actors|jobs|tests|conf|benchmarks|docs)/[\w./-]+\.\w+")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def exists(schema: Any, key: str) -> bool:
    """Whether the dotted ``key`` leads to a field of a dataclass, or into a dictionary of one."""
    if isinstance(schema, types.UnionType):
        schema = next(kind for kind in typing.get_args(schema) if kind is not types.NoneType)
    if not is_dataclass(schema):
        return typing.get_origin(schema) is dict
    name, _, rest = key.partition(".")
    kind = typing.get_type_hints(schema).get(name)
    return kind is not None and (not rest or exists(kind, rest))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda file: file.name)
def test_every_key_is_in_the_configuration(guide: Path) -> None:
    named = set(KEY.findall(guide.read_text()))
    assert {key for key in named if not any(exists(schema, key) for schema in SCHEMAS)} == set()


def test_a_key_that_is_not_there_would_be_noticed() -> None:
    assert KEY.findall("set `learner.micro_batch_tokens=8`, not actors/learner.py") == ["learner.micro_batch_tokens"]
    assert exists(Config, "reward.model.path") and exists(Config, "rollout.extra_kinds.big.num_workers")
    assert not exists(Config, "learner.micro_batch") and not exists(Config, "learner.num_ranks.x")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda file: file.name)
def test_every_file_and_link_is_there(guide: Path) -> None:
    text = guide.read_text()
    linked = {guide.parent / link for link in LINK.findall(text)}
    named = {ROOT / file for file in FILE.findall(text)}
    assert {str(file) for file in linked | named if not file.exists()} == set()

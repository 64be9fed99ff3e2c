"""The Python of docs/extending.md runs as it stands there, in the place that the page says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf.data.tasks
from rlhf.algorithms import make_algorithm
from rlhf.algorithms.custom import custom_loss
from rlhf.algorithms.losses import LossInputs
from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig
from rlhf.recipes import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
NAN = torch.nan


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AlgorithmConfig:
    """The page's files where its recipes look for them, and its recipes' ``algorithm`` section."""
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    recipe: Path = ROOT / "conf" / "grpo_tiny.yaml"
    for number, block in enumerate(blocks("yaml")):
        extending = tmp_path / f"{number}.yaml"
        extending.write_text(f"extends: {recipe}\n{block}")
        recipe = extending
    return load_config(recipe, ["algorithm.prompts_per_step=2", "algorithm.group_size=3"]).algorithm


def test_the_estimator(settings: AlgorithmConfig) -> None:
    batch = TrainBatch(
        tokens=torch.zeros(12, dtype=torch.long),
        prompt_lengths=torch.ones(6, dtype=torch.long),
        completion_lengths=torch.ones(6, dtype=torch.long),
        truncated=torch.tensor([False, False, True, False, False, False]),
        versions=torch.zeros(6, dtype=torch.int32),
        rewards=torch.tensor([1.0, 4.0, 2.0, 3.0, NAN, 5.0]),
    )
    done, _ = make_algorithm(settings).assign_advantages(batch)
    assert done.advantages is not None
    # the medians of 1, 4, 1.9 and of 3, 5 (the lower one)
    assert done.advantages.tolist() == pytest.approx([-0.9, 2.1, 0, 0, 0, 2])


def test_the_loss(settings: AlgorithmConfig) -> None:
    ratio = torch.tensor([1.0, 1.0, 3.0], requires_grad=True)
    x, advantages = torch.zeros(3, requires_grad=True), torch.tensor([2.0, -1.0, 1.0])
    token_loss = custom_loss(settings)
    assert token_loss is not None
    mask, lengths = torch.ones(3, dtype=torch.bool), torch.tensor([2, 1])
    loss, stats = token_loss(LossInputs(x, x.detach(), ratio, advantages, lengths, mask))
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    sigmoid = 1 / (1 + torch.tensor(-2.0).exp().item())
    gate = 4 * sigmoid * (1 - sigmoid)
    assert gradient.tolist() == pytest.approx([-2, 1, -gate])
    assert stats["loss/gate"].tolist() == pytest.approx([1, 1, gate])


def test_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks("python") if "(Task)" in block]
    module: dict[str, Any] = vars(rlhf.data.tasks).copy()
    exec(block, module)
    monkeypatch.setitem(rlhf.data.tasks.TASKS, "spell_backwards", module["SpellBackwards"])
    rows = rlhf.data.tasks.task_rows("spell_backwards", {"num_rows": 5}, split="train", seed=0)
    assert len(rows) == 5
    for row in rows:
        assert f"Spell {row['answer'][::-1]} backwards." in row["prompt"][0]["content"]


def test_every_file_that_the_page_names_and_that_is_here_is_linked_right() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link

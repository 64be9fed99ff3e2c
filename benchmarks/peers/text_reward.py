"""A reward that costs nothing and differs within a group, in the forms that verl and OpenRLHF load from a file."""

from typing import Any


def of_text(text: str) -> float:
    """In [0, 1)."""
    return sum(map(ord, text[:64])) % 97 / 97


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's form: one completion."""
    return of_text(solution_str)


def reward_func(queries: list[str], prompts: list[str], labels: Any, **_: Any) -> dict[str, Any]:
    """OpenRLHF's form: several, each with its prompt in front."""
    import torch

    rewards = torch.tensor([of_text(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}

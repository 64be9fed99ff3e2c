"""Episodes through the chat templates of many families: the model reads what it would be shown, to the token."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.batch import Prompt, Rollout
from rlhf.config import EnvironmentConfig
from rlhf.data.chat import render_chat
from rlhf.environments import tool_schemas
from rlhf.environments.template import ChatTemplate, tool_call
from rlhf.environments.tools import CallFormat, call_format, find_calls
from rlhf.errors import ConfigError, EpisodeFailedError
from tests.environments import Scripted, run, runner

TEMPLATES = Path(__file__).parents[1] / "templates"
IM_END = ("<|im_start|>", "<|im_end|>")
TOOL_CALL = CallFormat("<tool_call>", "</tool_call>")
WORDS = ("sum", "of", "what\nis", "", "it", "{", "</tool>", '"quoted"', "ünïcödé", "7")


@dataclass(frozen=True)
class Family:
    """``stop``: ends a reply; ``special``: other special tokens; ``calls``: its form, None: it calls no tools in JSON;
    ``rewrites``: roles whose messages change what its template shows of what came before."""

    stop: str
    special: tuple[str, ...]
    calls: CallFormat | None = None
    rewrites: tuple[str, ...] = ()
    parallel: bool = True  # several calls in a reply
    others: tuple[str, ...] = ()  # stop tokens besides


FAMILIES = {
    "chatml": Family("<|im_end|>", IM_END),
    "command-r7b": Family(
        "<|END_OF_TURN_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        CallFormat("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "deepseek-r1-distill": Family("<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>"), rewrites=("user",)),  # noqa: RUF001
    "gemma-2": Family("<end_of_turn>", ("<start_of_turn>",), others=("<eos>",)),
    "gemma-3": Family("<end_of_turn>", ("<start_of_turn>",), others=("<eos>",)),
    "glm-4": Family("<|user|>", ("[gMASK]", "<sop>", "<|assistant|>"), others=("<|endoftext|>", "<|observation|>")),
    "granite-3": Family(
        "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), CallFormat("<|tool_call|>", "")
    ),
    "hermes-2-pro": Family("<|im_end|>", IM_END, TOOL_CALL, rewrites=("tool",)),  # a line break after a result
    "llama-3.1": Family(
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        CallFormat("", ""),
        parallel=False,
        others=("<|eom_id|>", "<|end_of_text|>"),
    ),
    "mistral-nemo": Family(
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        CallFormat("[TOOL_CALLS]", ""),
        rewrites=("user",),  # the tools stand before the last user message
    ),
    "phi-3": Family("<|end|>", ("<|user|>", "<|system|>"), others=("<|endoftext|>", "<|assistant|>")),
    "phi-4-mini": Family(
        "<|end|>",
        ("<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        CallFormat("<|tool_call|>", "<|/tool_call|>"),
        others=("<|endoftext|>",),
    ),
    "qwen2.5": Family("<|im_end|>", IM_END, TOOL_CALL, others=("<|endoftext|>",)),
    "qwen3": Family("<|im_end|>", IM_END, TOOL_CALL, rewrites=("user",), others=("<|endoftext|>",)),
    "smollm2": Family("<|im_end|>", IM_END),
    "zephyr": Family("</s>", ()),
}


TOOL = "tests.environments.add"
SCHEMAS = tool_schemas(EnvironmentConfig(max_context_tokens=1, tools=[TOOL]))


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def speaking(name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """A tokenizer that has the family's template and special tokens, and the ids of its stop tokens."""
    family = FAMILIES[name]
    stops = [family.stop, *family.others]
    rstrip = name == "phi-3"  # whose special tokens take the whitespace after them
    special: Any = [AddedToken(token, rstrip=rstrip, special=True) for token in (*family.special, *stops)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|endoftext|>" if name.startswith("phi") else family.stop
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer, [ids_of(tokenizer, stop)[0] for stop in stops]


def shown(tokenizer: PreTrainedTokenizerBase, chat: Any, *, tools: bool, generate: bool = True) -> str:
    kwargs = {"tools": SCHEMAS} if tools else {}
    return render_chat(tokenizer, chat, date=None, add_generation_prompt=generate, kwargs=kwargs)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]


def write(call: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if call == TOOL_CALL:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
    return f"{call.opens}[{', '.join(written)}]{call.closes}" if call.opens else written[0]


def talk(name: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[Scripted, Rollout, str]:
    """A random conversation: the sampler, the episode, and the template's own rendering of all of it."""
    family, rng = FAMILIES[name], Random(seed)
    tokenizer, stop_ids = speaking(name, tokenizer)
    tools = family.calls is not None
    said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))).strip() for _ in range(4)]
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    if rng.random() < 0.5 and name not in ("gemma-2", "mistral-nemo"):  # which shows it in the last user message
        chat.insert(0, {"role": "system", "content": "Be brief."})
    prompt = Prompt(0, ids_of(tokenizer, shown(tokenizer, chat, tools=tools)), "", list(chat), {"said": said[1:]})
    replies: list[str] = []
    for number, message in enumerate(said):
        if number:
            chat.append({"role": "user", "content": message})
        for _ in range(rng.randint(0, 2) if tools else 0):
            assert family.calls is not None
            made = [("add", {"left": rng.randint(0, 99)}) for _ in range(rng.randint(1, 2 if family.parallel else 1))]
            calls = [tool_call(tool, arguments, f"call{i:05d}") for i, (tool, arguments) in enumerate(made)]
            asked = shown(tokenizer, chat, tools=True)
            chat.append({"role": "assistant", "content": "", "tool_calls": calls})
            after = shown(tokenizer, chat, tools=True, generate=False)
            # as the template writes it where that goes on from what was asked; a model may write it otherwise
            as_shown = after[len(asked) : after.find(family.stop, len(asked))] if after.startswith(asked) else ""
            replies.append(as_shown or write(family.calls, made))
            chat += [
                {"role": "tool", "name": tool, "tool_call_id": call["id"], "content": str(arguments["left"] + 1)}
                for call, (tool, arguments) in zip(calls, made, strict=True)
            ]
        replies.append(f"reply {number} {rng.choice(said)}".strip())
        opening = "<|START_RESPONSE|>" if name == "command-r7b" else ""
        closing = "<|END_RESPONSE|>" if name == "command-r7b" else ""
        chat.append({"role": "assistant", "content": replies[-1]})
        replies[-1] = f"{opening}{replies[-1]}{closing}"

    (stop,) = ids_of(tokenizer, family.stop)
    sampler = Scripted([[*ids_of(tokenizer, text), stop] for text in replies], stop)
    episodes = runner(tokenizer, "tests.environments.converse", stop_ids=stop_ids, tools=[TOOL] if tools else [])
    return sampler, run(episodes, prompt, sampler), shown(tokenizer, chat, tools=tools, generate=False)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_reads_what_its_template_would_show(name: str, seed: int, tokenizer: PreTrainedTokenizerBase) -> None:
    sampler, rollout, whole = talk(name, tokenizer, seed)
    episode = rollout.episode
    assert episode is not None and episode.status == "done" and len(sampler.requests) == len(sampler.replies)
    read = list(rollout.prompt.token_ids)
    sampled = []
    for request, reply in zip(sampler.requests, sampler.replies, strict=True):
        assert request.token_ids[: len(read)] == read, "a request is the one before it, the reply, and what is new"
        new = request.token_ids[len(read) :]
        sampled += [False] * len(new) + [True] * len(reply)
        read = [*request.token_ids, *reply]
    assert rollout.token_ids == read[len(rollout.prompt.token_ids) :]
    assert episode.sampled.tolist() == sampled
    assert rollout.logprobs is not None and rollout.logprobs.tolist() == [-1.0 - turn for turn in rollout.versions]
    assert rollout.versions.tolist() == [turn for turn, ids in enumerate(sampler.replies) for _ in ids]
    if not FAMILIES[name].rewrites:
        assert read[:-1] == ids_of(tokenizer, whole)[: len(read) - 1]  # GLM's last reply ends with what begins the next


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_says_which_messages_rewrite_what_came_before(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer, stop_ids = speaking(name, tokenizer)
    tools = SCHEMAS if FAMILIES[name].calls else []
    assert ChatTemplate(tokenizer, stop_ids=stop_ids, tools=tools).rewritten_by == [*FAMILIES[name].rewrites]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_calls_are_found_in_the_form_that_the_template_shows(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    form = FAMILIES[name].calls
    assert form is not None
    assert call_format(speaking(name, tokenizer)[0], SCHEMAS, {}) == form
    said, (call,) = find_calls(write(form, [("add", {"left": 3})]), form)
    assert (said, call.name, call.arguments, call.problem) == ("", "add", {"left": 3}, None)


@pytest.mark.parametrize("name", ["glm-4", "gemma-2", "zephyr"])
def test_tools_that_a_template_cannot_show_or_shows_in_another_form_are_an_error(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    why = "another form than JSON" if name == "glm-4" else "knows no tools"
    with pytest.raises(ConfigError, match=rf"environment\.tools: .*{why}"):
        call_format(speaking(name, tokenizer)[0], SCHEMAS, {})


def test_a_stop_token_that_begins_the_next_message_is_said_after_a_reply_that_ended_with_another(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer, stop_ids = speaking("glm-4", tokenizer)
    template = ChatTemplate(tokenizer, stop_ids=stop_ids)
    user, end, _ = stop_ids
    begin, go_on = [{"role": "user", "content": "Begin."}], [{"role": "user", "content": "Go on."}]
    rest = ids_of(tokenizer, "\nGo on.<|assistant|>\n")
    assert template.observed(begin, go_on, stopped_by=user) == rest
    assert template.observed(begin, go_on, stopped_by=end) == [user, *rest]


def test_a_closing_stop_token_is_not_said_again_after_a_reply_that_ended_with_another(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer, (_, end) = speaking("qwen2.5", tokenizer)
    template = ChatTemplate(tokenizer, stop_ids=[end])
    begin, go_on = [{"role": "user", "content": "Begin."}], [{"role": "user", "content": "Go on."}]
    rest = ids_of(tokenizer, "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
    assert template.observed(begin, go_on, stopped_by=end) == rest


def test_an_environment_may_say_what_the_prompt_says(tokenizer: PreTrainedTokenizerBase) -> None:
    """Nemo's template compares messages with the last."""
    tokenizer, stop_ids = speaking("mistral-nemo", tokenizer)
    template = ChatTemplate(tokenizer, stop_ids=stop_ids, tools=SCHEMAS)
    begin = [{"role": "user", "content": "Begin."}]
    text = str(tokenizer.decode(template.observed(begin, begin)))
    assert text.startswith("[AVAILABLE_TOOLS][") and text.endswith("[INST]Begin.[/INST]")


def test_a_template_without_a_stop_token_after_a_reply_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ConfigError, match=r"environment: .* has no place for a user message after a reply"):
        ChatTemplate(tokenizer)


def test_a_template_that_ends_only_prompts_with_a_stop_token_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    """What was said before the reply would be said again."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{{ eos_token if loop.first else '' }}\n{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"environment: .* has no place for a user message after a reply"):
        ChatTemplate(tokenizer)


def test_a_template_that_rejects_a_message_says_why(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer, stop_ids = speaking("gemma-2", tokenizer)
    template = ChatTemplate(tokenizer, stop_ids=stop_ids)
    with pytest.raises(EpisodeFailedError, match=r"rejects user, assistant, system: Conversation roles must alternate"):
        template.observed([{"role": "user", "content": "Begin."}], [{"role": "system", "content": "Stop."}])

"""The prompt of a request: its tokens, and where in them states are worth keeping."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from specdec_mlx.generation import encode
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.forced import is_forced, tools_for
from specdec_mlx.server.requests import RequestError, TextRequest

# tokens of a template's end in which a thought may begin, as in mlx-lm's server
LONGEST_TAIL = 11

ROLES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
"""What a message begins with where there is no chat template, as in mlx-lm's server; `role_mapping`
may say otherwise."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as tokens [n].

    ends: ascending positions that later prompts are likely to share. in_thought: what is written
    next is a thought.
    """

    tokens: list[int]
    ends: Sequence[int] = ()
    in_thought: bool = False


def has_grammar(request: TextRequest) -> bool:
    """True if what is written is kept to a grammar from the first token on: nothing is thought."""
    return request.grammar is not None or is_forced(request)


def read_prompt(
    request: TextRequest,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    finds_ends: bool = False,
) -> ReadPrompt:
    """The prompt of a request; raises RequestError, also for what its template raises.

    finds_ends: for caches that go back to some positions only.
    """
    try:
        if request.messages is None:
            prompt = ReadPrompt(encode(tokenizer, request.prompt))
        else:
            messages = [
                as_template_takes_it(each, tokenizer) for each in request.messages
            ]
            if tokenizer.has_chat_template:
                prompt = _of_chat(request, messages, tokenizer, settings, finds_ends)
            else:
                prompt = ReadPrompt(
                    encode(tokenizer, _without_template(request, messages))
                )
    except RequestError:
        raise
    except Exception as error:  # a template is a program
        raise RequestError(f"The prompt cannot be read: {error}") from error
    if not prompt.tokens:
        raise RequestError("The prompt is empty. Give at least one token.")
    return prompt


def _of_chat(
    request: TextRequest,
    messages: list[dict[str, Any]],
    tokenizer: Any,
    settings: ServerSettings,
    finds_ends: bool,
) -> ReadPrompt:
    names = {**settings.chat_template_args, **request.template}
    if has_grammar(request):
        names = {"enable_thinking": False, **names}
    if tools := tools_for(request):
        names["tools"] = tools

    def rendered(those: list[dict[str, Any]], **how: Any) -> str:
        text: str = tokenizer.apply_chat_template(those, tokenize=False, **how, **names)
        return text

    going_on = (
        "continue_final_message" if request.continues else "add_generation_prompt"
    )
    text = rendered(messages, **{going_on: True})
    tokens = _tokens_of(text, tokenizer)
    ends = list[int]()
    if finds_ends:
        system = [*takewhile(lambda message: message["role"] == "system", messages)]
        if 0 < len(system) < len(messages):
            alone = rendered([*system, {"role": "user", "content": ""}])
            ends.append(_num_shared(_tokens_of(alone, tokenizer), tokens))
        if tokenizer.has_thinking and not request.continues:
            ends.append(
                tokenizer.rfind_think_start(tokens, start=len(tokens) - LONGEST_TAIL)
            )
        ends = sorted(end for end in {*ends, len(tokens)} if end > 0)
    in_thought = not has_grammar(request) and _in_thought(text, request, tokenizer)
    return ReadPrompt(tokens, ends, in_thought)


def _tokens_of(rendered: str, tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _in_thought(text: str, request: TextRequest, tokenizer: Any) -> bool:
    """True if a thought is open at the end of a rendered prompt.

    It is the template that opens one, as the last thing it writes; in an answer that is continued,
    what was said of it so far.
    """
    if tokenizer.response_initial_state is not None:
        return bool(tokenizer.response_initial_state == "reasoning")
    if not tokenizer.has_thinking:
        return False
    if request.continues:
        begun = text.rfind(tokenizer.think_start)
        return begun > text.rfind(tokenizer.think_end)
    return text.rstrip().endswith(tokenizer.think_start.strip())


def as_template_takes_it(message: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A message with its calls' arguments as objects.

    A call whose arguments are none, as where an answer was cut, is a part of the text.
    """
    taken: dict[str, Any] = copy.deepcopy(dict(message))
    taken["content"] = taken.get("content") or ""
    if calls := taken.pop("tool_calls", None):
        taken["tool_calls"] = []
        for call in calls:
            function = call.get("function") or {}
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = _object_in(arguments)
            if arguments is None:
                taken["content"] += _call_as_text(function, tokenizer)
            else:
                taken["tool_calls"].append(
                    {**call, "function": {**function, "arguments": arguments}}
                )
        if not taken["tool_calls"]:
            del taken["tool_calls"]
    return taken


def _object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None for any other text."""
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _call_as_text(function: Mapping[str, Any], tokenizer: Any) -> str:
    """A call as models write it, with its arguments as they stand."""
    begin, end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
    name = json.dumps(function.get("name", ""))
    return f'{begin}{{"name": {name}, "arguments": {function["arguments"]}}}{end}'


def _without_template(
    request: TextRequest, messages: Sequence[Mapping[str, Any]]
) -> str:
    """A chat as text, for a model without a template."""
    roles = {**ROLES, "stop": "\n", **(request.template.get("role_mapping") or {})}
    lines = [f"{roles.get(m['role'], '')}{m.get('content') or ''}" for m in messages]
    if not request.continues:
        lines.append(roles["assistant"].rstrip())
    return str(roles["stop"]).join(lines)

"""The prompt of a request: its tokens, and where in them states are worth keeping."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

from specdec_mlx.generation import encode
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.forced import is_forced, tools_for
from specdec_mlx.server.pictures import SeenPrompt, Sight, named_only
from specdec_mlx.server.requests import Object, RequestError, TextRequest

# tokens of a template's end in which a thought may begin, as in mlx-lm's server
LONGEST_TAIL = 11

ROLES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
"""What a message begins with where there is no chat template, as in mlx-lm's server; `role_mapping`
may say otherwise."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as tokens [n].

    ends: ascending positions that later prompts are likely to share. in_thought: what is written
    next is a thought. seen: the prompt with its pictures, if it has any.
    """

    tokens: list[int]
    ends: Sequence[int] = ()
    in_thought: bool = False
    seen: SeenPrompt | None = None

    @property
    def keys(self) -> list[int]:
        """What the prompt's caches are kept by, [n]: its tokens, and the pictures among them."""
        return self.tokens if self.seen is None else self.seen.keys


def has_grammar(request: TextRequest) -> bool:
    """True if what is written is kept to a grammar from the first token on: nothing is thought."""
    return request.grammar is not None or is_forced(request)


def read_prompt(
    request: TextRequest,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    finds_ends: bool = False,
    sight: Sight | None = None,
) -> ReadPrompt:
    """The prompt of a request; raises RequestError, also for what its template raises.

    finds_ends: for caches that go back to some positions only. sight: of a model that has it.
    """
    try:
        messages = [
            as_template_takes_it(each, tokenizer) for each in request.messages or ()
        ]
        if request.messages is None:
            prompt = ReadPrompt(encode(tokenizer, request.prompt))
        elif tokenizer.has_chat_template:
            prompt = _of_chat(request, messages, tokenizer, settings, finds_ends, sight)
        else:
            text = _without_template(request, messages)
            prompt = _with_pictures(text, request, sight) or ReadPrompt(
                encode(tokenizer, named_only(text))
            )
    except Exception as error:  # a template is a program
        raise RequestError(f"The prompt cannot be read: {error}") from error
    if not prompt.tokens:
        raise RequestError("The prompt is empty. Give at least one token.")
    return prompt


def _of_chat(
    request: TextRequest,
    messages: list[Object],
    tokenizer: Any,
    settings: ServerSettings,
    finds_ends: bool,
    sight: Sight | None,
) -> ReadPrompt:
    names: Object = {"enable_thinking": False} if has_grammar(request) else {}
    names |= {**settings.chat_template_args, **request.template}
    if tools := tools_for(request):
        names["tools"] = tools
    encoded = partial(tokenizer.encode, add_special_tokens=False)
    template = partial(tokenizer.apply_chat_template, tokenize=False, **names)

    def rendered(messages: list[Object], **how: Any) -> str:
        return str(
            template(messages if sight is None else sight.contents(messages), **how)
        )

    going_on = (
        "continue_final_message" if request.continues else "add_generation_prompt"
    )
    text = rendered(messages, **{going_on: True})
    with_pictures = _with_pictures(text, request, sight)
    prompt = with_pictures or ReadPrompt(encoded(named_only(text)))
    tokens, ends = prompt.tokens, list[int]()
    if finds_ends:
        system = [*takewhile(lambda message: message["role"] == "system", messages)]
        if 0 < len(system) < len(messages):
            alone = encoded(rendered([*system, {"role": "user", "content": ""}]))
            ends.append(len([*takewhile(bool, map(eq, alone, tokens))]))
        if tokenizer.has_thinking and not request.continues:
            ends.append(
                tokenizer.rfind_think_start(tokens, start=len(tokens) - LONGEST_TAIL)
            )
        ends = sorted(end for end in {*ends, len(tokens)} if end > 0)
    in_thought = not has_grammar(request) and _in_thought(text, request, tokenizer)
    return replace(prompt, ends=ends, in_thought=in_thought)


def _with_pictures(
    text: str, request: TextRequest, sight: Sight | None
) -> ReadPrompt | None:
    """A rendered prompt that has pictures, if the model sees them."""
    seen = None if sight is None else sight.read(text, request.pictures)
    return None if seen is None else ReadPrompt(seen.tokens, seen=seen)


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


def as_template_takes_it(message: Object, tokenizer: Any) -> Object:
    """A message with its calls' arguments as objects.

    A call whose arguments are none, as where an answer was cut, is a part of the text.
    """
    taken = copy.deepcopy(message)
    taken["content"] = taken.get("content") or ""
    calls = []
    for call in taken.pop("tool_calls", None) or ():
        called = call["function"]
        arguments = called.get("arguments") or {}
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            read = None
        if isinstance(read, dict):
            called["arguments"] = read
            calls.append(call)
        else:
            taken["content"] += _call_as_text(called["name"], arguments, tokenizer)
    return taken | ({"tool_calls": calls} if calls else {})


def _call_as_text(name: str, arguments: Any, tokenizer: Any) -> str:
    """A call as models write it, with its arguments as they stand."""
    begin, end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
    return f'{begin}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{end}'


def _without_template(request: TextRequest, messages: Sequence[Object]) -> str:
    """A chat as text, for a model without a template."""
    roles = {**ROLES, "stop": "\n", **(request.template.get("role_mapping") or {})}
    lines = [f"{roles.get(m['role'], '')}{m.get('content') or ''}" for m in messages]
    if not request.continues:
        lines.append(roles["assistant"].rstrip())
    return str(roles["stop"]).join(lines)

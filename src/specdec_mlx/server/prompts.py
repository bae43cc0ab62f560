"""The prompt of a request: its tokens, and where in them states are worth keeping."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any

from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.generation import encode
from specdec_mlx.memory.drafter_states import num_common
from specdec_mlx.models.loading import PerModel
from specdec_mlx.server.constraints import reads_calls
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.loading import LONGEST_TEXT
from specdec_mlx.server.pictures import SeenPrompt, Sight, replace_pictures
from specdec_mlx.server.protocols.turns import with_folded_system
from specdec_mlx.server.requests import Object, RequestError, TextRequest

LONGEST_TAIL = 11  # tokens of a template's end in which a thought may begin, as in mlx-lm's server

# Characters of a text that are tokenized at a time where its length is only estimated. In each such
# piece `JOINT` tokens may be due to the cuts, which split words.
PIECE, JOINT = 2**14, 64

ROLES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
"""What a message begins with where there is no chat template, as in mlx-lm's server; `role_mapping`
may say otherwise."""


@dataclass
class ReadPrompt:
    """A prompt as tokens [n].

    Attributes:
        prefill_stops: ascending positions that later prompts are likely to share.
        in_thought: the prompt has opened a thought, so the text goes on in it.
        thought: the marks of the thought that the text may begin with, or None.
        seen: the prompt with its pictures, if it has any.
    """

    tokens: list[int]
    prefill_stops: Sequence[int] = ()
    in_thought: bool = False
    thought: Thought | None = None
    seen: SeenPrompt | None = None

    @property
    def keys(self) -> list[int]:
        """What the prompt's caches are kept by, [n]: its tokens, and the pictures among them."""
        return self.tokens if self.seen is None else self.seen.keys


READING = Lock()
"""Held while a tokenizer reads: tokenizers are no friends of threads."""

longest_token = PerModel(lambda tokenizer: max(map(len, tokenizer.get_vocab()), default=1))
"""Characters of a tokenizer's longest token."""


def too_long(num_tokens: int, most: int, what: str = "prompt") -> RequestError:
    """The error for a text with at least so many tokens, more than a model has positions."""
    words = f"The {what} has at least {num_tokens} tokens; there are {most} positions for a text."
    return RequestError(words, "context_length_exceeded", num_tokens, most)


def check_length(text: str, tokenizer: Any, most: int, what: str = "prompt") -> None:
    """Raise RequestError for a text that surely has more than `most` tokens.

    Only as much of the text is tokenized as is needed to tell.
    """
    if (least := len(text) // longest_token(tokenizer)) > most:
        raise too_long(least, most, what)
    if len(text) <= most:
        return
    least = 0
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        with READING:
            num_tokens = len(tokenizer.encode(piece, add_special_tokens=False))
        if start == 0 and num_tokens * len(text) <= most * PIECE:
            return  # as far as the beginning tells, the text fits
        least += max(0, num_tokens - JOINT)
        if least > most:
            raise too_long(least, most, what)


def encoded(tokenizer: Any, text: str | list[int], *, is_bare: bool = False) -> list[int]:
    """Token ids of a text; any thread may ask. is_bare: it lacks its special tokens."""
    with READING:
        if is_bare:
            return encode(tokenizer, text)
        return list(tokenizer.encode(text, add_special_tokens=False))


def read_prompt(
    request: TextRequest,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    most: int = LONGEST_TEXT,
    finds_stops: bool = False,
    sight: Sight | None = None,
) -> ReadPrompt:
    """The prompt of a request.

    Args:
        most: positions of the model. A prompt with far more tokens is not read to its end.
        finds_stops: for caches that can go back to some positions only.
        sight: of a vision model.

    Raises:
        RequestError: the prompt is empty or too long, or its template raises an error.
    """
    try:
        messages = [as_template_takes_it(each, tokenizer) for each in request.messages or ()]
        if request.messages is not None and tokenizer.has_chat_template:
            prompt = _of_chat(request, messages, tokenizer, settings, most, finds_stops, sight)
        elif request.messages is not None:
            text = _without_template(request, messages)
            prompt = _read(text, request, tokenizer, most, sight, is_bare=True)
        else:
            if isinstance(request.prompt, str):
                check_length(request.prompt, tokenizer, most)
            prompt = ReadPrompt(encoded(tokenizer, request.prompt, is_bare=True))
    except RequestError:
        raise
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
    most: int,
    finds_stops: bool,
    sight: Sight | None,
) -> ReadPrompt:
    # with a grammar nothing is thought unless the server or the request asks for thoughts
    names: Object = {"enable_thinking": False} if request.has_grammar else {}
    names |= {**settings.chat_template_args, **request.template}
    may_think = request.continues or bool(names.get("enable_thinking") or names.get("thinking"))
    if tools := request.offered_tools:
        names["tools"] = tools

    def render(messages: list[Object], **ending: Any) -> str:
        taken = messages if sight is None else sight.contents(messages)
        return str(tokenizer.apply_chat_template(taken, tokenize=False, **names, **ending))

    ending: Object = {
        "continue_final_message" if request.continues else "add_generation_prompt": True
    }
    text, messages = _accepted(partial(render, **ending), messages)
    prompt = _read(text, request, tokenizer, most, sight)
    if finds_stops:
        # Conversations with one system prompt share its tokens, whatever follows.
        system = [*takewhile(lambda message: message["role"] == "system", messages)]
        begin = ""
        if 0 < len(system) < len(messages):
            begin = render([*system, {"role": "user", "content": ""}])
        prompt.prefill_stops = _find_stops(
            prompt.tokens, encoded(tokenizer, begin), request, tokenizer
        )
    if not request.has_grammar or (may_think and tokenizer.has_thinking):
        prompt.in_thought = _in_thought(text, request, tokenizer)
        if tokenizer.has_thinking and (prompt.in_thought or not request.continues):
            prompt.thought = thought_of(request, tokenizer, prompt.in_thought)
    return prompt


def _find_stops(
    tokens: list[int], begin: list[int], request: TextRequest, tokenizer: Any
) -> Sequence[int]:
    """Positions in a chat's prompt that later prompts are likely to share.

    They are after the system prompt, before the thought that is left out later, and at the end.
    begin: a prompt with the same system prompt.
    """
    stops = {num_common(begin, tokens), len(tokens)}
    if tokenizer.has_thinking and not request.continues:
        stops.add(tokenizer.rfind_think_start(tokens, start=len(tokens) - LONGEST_TAIL))
    return sorted(stop for stop in stops if stop > 0)


def _read(
    text: str,
    request: TextRequest,
    tokenizer: Any,
    most: int,
    sight: Sight | None,
    *,
    is_bare: bool = False,
) -> ReadPrompt:
    """A rendered prompt, read: with its pictures if the model sees them, else with their names."""
    if sight is None:
        text, digests = replace_pictures(text), list[str]()
    else:
        text, digests = sight.placed(text)
    check_length(text, tokenizer, most)
    if sight is not None and digests:
        seen = sight.read(text, digests, request.pictures)
        return ReadPrompt(seen.tokens, seen=seen)
    return ReadPrompt(encoded(tokenizer, text, is_bare=is_bare))


def _accepted(
    render: Callable[[list[Object]], str], messages: list[Object]
) -> tuple[str, list[Object]]:
    """A chat as its template renders it, and the messages that the template accepted.

    Many templates refuse a system message after the first message, and some refuse any. Then each
    of these becomes a part of the user's turn beside it. Raises what the template raises at last.
    """
    for first_role in ("system", "user"):
        with suppress(Exception):
            return render(messages), messages
        messages = with_folded_system(messages, first_role)
    return render(messages), messages


def thought_of(request: TextRequest, tokenizer: Any, is_open: bool) -> Thought:
    """The marks of the thought that a text may begin with. is_open: the prompt has opened it."""
    return Thought(
        closes=tokenizer.think_end_tokens,
        opens=() if is_open else tokenizer.think_start_tokens,
        calls=tokenizer.tool_call_start_tokens if reads_calls(request, tokenizer) else (),
        eos_ids=tuple(tokenizer.eos_token_ids),
    )


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

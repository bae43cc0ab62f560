"""Tool calls in a text: JSON arguments as they come, those of other formats once they are whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import regex

from specdec_mlx.server.constraints import DEEPEST_SCHEMA
from specdec_mlx.server.requests import CallArguments, CallBegan, CallBroken, Event, Object

NUM_ID = 9  # letters of a call's id: some chat templates refuse any other number

BETWEEN = regex.compile(
    r"(?:\[TOOL_CALLS\]|<\|tool_call_end\|>|<\|tool_calls_section_end\|>|</tool_call>|[\s\[\],}])*"
)
"""What may stand beside a call whose arguments come as JSON, and between two."""

HEADER = regex.compile(
    BETWEEN.pattern
    + r"""+(?: \{\s* "name" \s*:\s* "(?P<name>[^"\\]{1,128})" \s*,\s* "arguments" \s*:\s*
      | (?P<name>[\w.-]{1,128}) \s* \[ARGS\] \s*
      | (?:<\|tool_call_begin\|>)? \s* (?P<id>(?:functions\.)?(?P<name>[\w.-]{1,128}):\d+) \s*
        <\|tool_call_argument_begin\|> \s*
    ) (?=\{\s*["}])""",
    regex.VERBOSE,
)
"""What stands before the JSON object of a call's arguments: in Hermes' format, which most models
took over, in Mistral's, and in Kimi's."""

PIECE = 64
"""Characters of a call's arguments after which it is announced, and pieces are sent, before it is
whole. Most calls that turn out to be none do so earlier, and are text."""

SPACE, STRUCTURE = " \t\r\n", ' \t\r\n{}[],:"'
ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
SCALAR = regex.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", regex.ASCII)
FOLLOWING = {
    "{": {"{": '"}', ",": '"', "key": ":", ":": '"{[0', "value": ",}"},
    "[": {"[": '"{[0]', ",": '"{[0', "value": ",]"},
}
"""In an object and in a list, what may come after each token; 0 is a number or a name."""


class JsonObject:
    """The text of a JSON object that comes in pieces; what was taken of it can become an object.

    Line ends and the like in a string, and a backslash before what JSON does not escape, are
    escaped: models forget that, and what they meant is plain.
    """

    def __init__(self) -> None:
        self.is_complete = self.is_broken = self.is_in_string = False
        self._open, self._before = "", ""  # brackets, and the last token
        self._escape = self._word = ""  # what is not whole yet

    def take(self, text: str) -> tuple[str, str]:
        """What of a piece belongs to the object, and what comes after it."""
        taken: list[str] = []
        for place, char in enumerate(text):
            if self.is_in_string:
                taken.append(self._in_text(char))
                continue
            if char not in STRUCTURE:
                self._word += char
                continue
            if word := self._word:
                self._word = ""
                self._go_on("0")
                self.is_broken |= SCALAR.fullmatch(word) is None
            if char not in SPACE:
                self._go_on(char)
            if self.is_broken:
                return "".join(taken), text[place:]
            taken += word, char
            if self.is_complete:
                return "".join(taken), text[place + 1 :]
        return "".join(taken), ""

    def _go_on(self, token: str) -> None:
        """Take the next token, of which a string is its first quote."""
        if self._open:
            allowed = FOLLOWING[self._open[-1]].get(self._before, "")
            self.is_broken |= token not in allowed
        if token in "}]":
            self._open = self._open[:-1]
            self.is_complete = not (self._open or self.is_broken)
        elif token in "{[":
            self._open += token
            self.is_broken |= len(self._open) > DEEPEST_SCHEMA
        self.is_in_string = token == '"' and not self.is_broken
        is_key = self.is_in_string and self._open.endswith("{") and self._before != ":"
        self._before = "key" if is_key else token if token in "{[,:" else "value"

    def _in_text(self, char: str) -> str:
        """The JSON text of a character of a string, of an escape once it is whole."""
        if not self._escape and char != "\\":
            self.is_in_string = char != '"'
            return json.dumps(char)[1:-1] if char < " " else char
        self._escape += char
        match = ESCAPE.fullmatch(self._escape, partial=True)
        if match is not None and match.partial:
            return ""
        escape, self._escape = self._escape, ""
        if match is not None:
            return escape
        return "\\\\" + "".join(map(self._in_text, escape[1:]))


class CallReader:
    """The text between the marks of one or more calls, read in pieces.

    A call is announced once the name of a tool and the beginning of a JSON object are read. The
    text of the object follows in pieces. Other formats wait for the end and for mlx-lm's parser.

    Attributes:
        index: of the next call.
        num_whole: number of finished calls.
        is_full: no further call is wanted.
        is_broken: the open call is no call.
        left: text that belongs to no call, known once the reader is closed.
    """

    def __init__(
        self,
        parse: Callable[..., Any],
        tools: Sequence[Object],
        index: int,
        mark: str,
        is_single: bool,
    ) -> None:
        """Begin to read calls.

        Args:
            index: of the first call.
            mark: the text before the first call.
            is_single: one call is enough.
        """
        self.num_whole = 0
        self.is_broken = self.is_full = False
        self.left = ""
        self._parse = parse
        self._names = {tool["function"]["name"] for tool in tools}
        self._tools = [  # some parsers count on parameters
            {**tool, "function": {"parameters": {}, **tool["function"]}} for tool in tools
        ]
        self.index, self._is_single = index, is_single
        self._text = mark  # since the last call that is whole
        self._body = self._rest = ""  # all of it, and what is not read yet
        self._object: JsonObject | None = None
        self._began: CallBegan | None = None  # not told yet
        self._pending = ""  # of its arguments
        self._may_begin = True

    @property
    def is_in_string(self) -> bool:
        """True in the middle of a JSON string, where marks are text."""
        return self._object is not None and self._object.is_in_string

    def feed(self, piece: str) -> list[Event]:
        self._body += piece
        self._text += piece
        self._rest += piece
        events: list[Event] = []
        while not self.is_full and not self.is_broken and (self._object or self._begins()):
            assert self._object is not None
            taken, self._rest = self._object.take(self._rest)
            self._pending += taken
            self.is_broken = self._object.is_broken
            if not self._object.is_complete:
                if len(self._pending) >= PIECE:
                    events.append(self._handed_over())
                break
            events.append(self._handed_over())
            # Only the text since the last whole call can become part of the answer.
            self._object, self._text = None, self._rest
            self._finish_one()
        return events

    def close(self, mark: str, *, is_whole: bool) -> list[Event]:
        """The last events. mark: what ended the calls. is_whole: they were not cut."""
        self._text += mark
        if self._object is not None:
            self.is_broken = self._began is None
            if self.is_broken:
                self.index += 1
                return [CallBroken(self.index - 1, self._text)]
            self.left = self._text
            return []
        events: list[Event] = []
        for call_id, name, arguments in self._parsed()[self.num_whole :] if is_whole else ():
            if not self.is_full:
                events.append(CallBegan(self.index, call_id, name, arguments))
                self._finish_one()
                self._text = ""
        if not self.num_whole:
            self.left = self._text
        elif not mark and not BETWEEN.fullmatch(self._text, partial=True):
            self.left = BETWEEN.sub("", self._text, count=1)
        return events

    def _finish_one(self) -> None:
        self.num_whole += 1
        self.index += 1
        self.is_full = self._is_single

    def _handed_over(self) -> Event:
        """What is held of the arguments, with the beginning of their call if it is not told."""
        text, began, self._pending, self._began = self._pending, self._began, "", None
        return replace(began, text=text) if began else CallArguments(self.index, text)

    def _begins(self) -> bool:
        """True if the arguments of a call begin here."""
        header = HEADER.match(self._rest, partial=True) if self._may_begin else None
        if header is not None and header.partial:
            return False
        self._may_begin = header is not None and header["name"] in self._names
        if header is None or not self._may_begin:
            return False
        self._rest = self._rest[header.end() :]
        self._object = JsonObject()
        self._began = CallBegan(self.index, header["id"] or new_id(), header["name"])
        return True

    def _parsed(self) -> list[tuple[str, str, str]]:
        """Id, name and arguments of all calls, [] if one of them is none."""
        try:
            parsed = self._parse(self._body, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [self._checked(call) for call in calls]
        except Exception:  # parsers raise whatever a broken text makes them
            return []

    def _checked(self, call: Object) -> tuple[str, str, str]:
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))  # Llama's name
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError(f"{name!r} is no tool, or is not given an object.")
        call_id = call.get("id")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # half a pair of surrogates is no text
        text = text.encode("utf-8", "replace").decode()
        return call_id if isinstance(call_id, str) and call_id else new_id(), name, text


def new_id() -> str:
    return uuid4().hex[:NUM_ID]

"""One text between tokens and events: what is shown of it, thoughts, calls, and where it ends.

Everything is matched on the detokenized text, so how the model cut it into tokens does not matter.
Stop strings end the answer alone: in thoughts and in calls they are text like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.tool_parsers.json_tools import parse_tool_call

from specdec_mlx.drafters.thoughts import Thought
from specdec_mlx.server.constraints import is_bare_call, reads_calls
from specdec_mlx.server.requests import CallBroken, Ended, Event, TextPiece, TextRequest
from specdec_mlx.server.text.calls import CallReader
from specdec_mlx.server.text.logprobs import SeenLogprobs, token_logprob
from specdec_mlx.stop_strings import StopStrings

ANSWER, THOUGHT, CALL = "normal", "reasoning", "tool"
"""Parts of a text, in the words of mlx-lm's response formats; any other part is not shown."""

UNDECIDED = "undecided"
"""The part of a text that may begin with a thought, before its first tokens are there."""


def _marks(tokenizer: Any, has_calls: bool, is_plain: bool) -> dict[str, dict[str, str]]:
    """For each part of a text the marks that end it, and the part that comes after each."""
    marks: dict[str, dict[str, str]] = {ANSWER: {}, THOUGHT: {}, CALL: {}}
    if not is_plain:
        if tokenizer.has_thinking:
            marks[ANSWER][tokenizer.think_start] = THOUGHT
            marks[THOUGHT][tokenizer.think_end] = ANSWER
        marks[ANSWER] |= dict.fromkeys(tokenizer.structural_markers, ANSWER)
        for part, edges in tokenizer.response_transitions.items():
            marks.setdefault(part, {}).update(edges)
    if not has_calls:
        return {
            part: {mark: after for mark, after in edges.items() if after != CALL}
            for part, edges in marks.items()
        }
    if all(CALL not in edges.values() for edges in marks.values()):
        marks[ANSWER][tokenizer.tool_call_start] = CALL
    marks[THOUGHT][tokenizer.tool_call_start] = CALL
    if tokenizer.tool_call_end:
        marks[CALL][tokenizer.tool_call_end] = ANSWER
    return marks


NUM_BEFORE = 8  # tokens of the prompt's end that a text is detokenized with


class TextState:
    """The text of one request's tokens, as events.

    Thoughts are recognized in chats, and calls if the request has tools. Under a grammar, only a
    thought at the beginning counts, and its tokens tell where it ends. A broken call becomes text
    with its marks. So does a call of an unknown tool, and a call that `max_tokens` cuts unless it
    was forced. Blanks beside a call are dropped, and so is all text beside forced calls.

    Attributes:
        ended: "stop" or "tool_calls" after the end token, a stop string or the last wanted call.
            Later tokens are ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        request: TextRequest,
        prompt: Sequence[int],
        in_thought: bool,
        thought: Thought | None = None,
    ) -> None:
        """Begin after the prompt.

        Args:
            in_thought: the prompt has opened a thought.
            thought: its marks, if tokens tell where it ends.
        """
        self.ended: str | None = None
        self.num_written = self.num_thought = self.num_calls = self.accepted = 0
        self._tokenizer, self._request = tokenizer, request
        self._tools = request.offered_tools
        self._is_bare = is_bare_call(request, tokenizer)
        self._is_forced = request.is_forced
        has_schema = request.grammar is not None and not self._is_forced
        is_plain = request.messages is None or has_schema or self._is_bare
        self._has_calls = reads_calls(request, tokenizer)
        self._marks = _marks(tokenizer, self._has_calls, is_plain)
        self._thought = thought
        self._is_thinking = thought is not None and in_thought  # as the tokens tell
        self._tokens = list[int]()  # until the thought is closed
        if thought is not None:
            self._marks[THOUGHT][tokenizer.think_end] = ANSWER
        self._detokenizer = tokenizer.detokenizer
        # characters of the detokenizer's text
        self._num_read = self._read_prompt(prompt)
        self._logprobs = SeenLogprobs()
        self._text = ""  # not decided yet
        self._place = 0  # characters before it
        self._part = ANSWER
        # an answer's first blanks; None once more of it was shown
        self._blank: str | None = ""
        self._call: CallReader | None = None
        # of the last call; once it is over, its first mark is text
        self._call_place = -1
        self._part_before_call = ANSWER
        self._num_begun = 0  # calls, those that broke among them
        self._is_cut = False
        self._stop: str | None = None
        if thought is not None:
            self._part = THOUGHT if in_thought else UNDECIDED
        elif is_plain:
            self._begin_answer()
        else:
            self._part = THOUGHT if in_thought else tokenizer.response_initial_state or ANSWER

    def add(self, token: int, logprobs: mx.array | None, from_draft: bool) -> list[Event]:
        """The events of the next token. logprobs: [V], of its position."""
        if self.ended is not None:
            return []
        self.num_written += 1
        self.num_thought += self._part == THOUGHT
        self.accepted += from_draft
        num_alternatives = self._request.num_logprobs
        if num_alternatives is not None and logprobs is not None:
            entry = token_logprob(self._tokenizer, token, logprobs, num_alternatives)
            self._logprobs.add(entry)
        if token in self._tokenizer.eos_token_ids:
            self.ended = "stop"
            return []
        self._detokenizer.add_token(token)
        self._follow_thought(token)
        return self._advance()

    def _follow_thought(self, token: int) -> None:
        """Note whether the thought at the beginning of the text is open after a token."""
        if self._thought is None:
            return
        self._tokens.append(token)
        opens = self._thought.opens
        if self._is_thinking:
            self._is_thinking = not self._thought.is_closed_by(self._tokens)
        elif len(self._tokens) <= len(opens):
            self._is_thinking = (*self._tokens,) == opens
        else:
            self._thought = None

    def end(self, reason: str) -> list[Event]:
        """The text that was held back, and the end.

        reason: "stop" or "length"; what is in `ended` has the last word.
        """
        reason = self.ended or reason
        events: list[Event] = []
        if not self._is_cut:
            self._detokenizer.finalize()
            events = self._advance(final=reason)
            if not self.num_calls and not self._is_cut:
                events += self._unblank()
                if rest := self._logprobs.take_rest():
                    events.append(TextPiece("", logprobs=rest))
        if self.num_calls and reason == "stop":
            reason = "tool_calls"
        ended = Ended(
            reason,
            self._stop,
            num_written=self.num_written,
            num_thought=self.num_thought,
            accepted=self.accepted,
        )
        return [*events, ended]

    def _read_prompt(self, prompt: Sequence[int]) -> int:
        """Number of characters of the prompt's end, where the text goes on from it.

        Detokenizers drop a space at the beginning of all text. In a new answer that is as it should
        be; in one that goes on, or after the end of a line of code, the space is the text's own.
        """
        request, end = self._request, list(prompt[-NUM_BEFORE:])
        is_completion = request.messages is None
        goes_on = request.continues or request.echo
        if not goes_on and not (is_completion and self._tokenizer.decode(end).endswith("\n")):
            return 0
        for token in end:
            self._detokenizer.add_token(token)
        # Finished as a copy, because the text goes on in the detokenizer itself.
        finished = copy(self._detokenizer)
        finished.finalize()
        return len(finished.text)

    def _advance(self, final: str | None = None) -> list[Event]:
        """Decide what can be decided; all of it for a `final` reason."""
        text = self._detokenizer.text
        piece, self._num_read = text[self._num_read :], max(self._num_read, len(text))
        self._logprobs.place(self._place + len(self._text), piece)
        self._text += piece
        events: list[Event] = []
        if self._part == UNDECIDED:
            self._decide(is_final=final is not None)
        while self._part != UNDECIDED and not self._is_cut:
            marks = self._marks[self._part]
            stops = self._request.stop if self._part == ANSWER else ()
            search = StopStrings([*marks, *stops]).search
            num_before, mark = search(self._text, final=final is not None)
            after = marks.get(mark or "")
            if after == CALL and self._place + num_before == self._call_place:
                # This mark began a call that was none. One character is passed, so that it is not
                # found again.
                events += self._take(num_before + 1)
                continue
            events += self._take(num_before)
            if self._is_cut:
                break
            is_in_string = self._call is not None and self._call.is_in_string
            is_thought = self._part == THOUGHT and self._is_thinking
            if mark is not None and (is_in_string or is_thought):
                # what a file says that is being written, or a thought whose tokens go on
                events += self._take(len(mark))
            elif mark is None:
                if final is None or self._part != CALL:
                    break
                events += self._end_call("", is_whole=final == "stop")
            elif after is None:
                self._is_cut, self.ended, self._stop = True, "stop", mark
                events += self._unblank()
            else:
                events += self._pass(mark, after)
        return events

    def _decide(self, *, is_final: bool) -> None:
        """Tell by its first tokens whether the text begins with a thought."""
        assert self._thought is not None
        if self._is_thinking:
            self._part, mark = THOUGHT, self._tokenizer.think_start
            num_before = len(self._text) - len(self._text.removeprefix(mark))
            self._text, self._place = self._text[num_before:], self._place + num_before
        elif is_final or (*self._tokens,) != self._thought.opens[: len(self._tokens)]:
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._part = ANSWER
        if self._is_bare:
            self._begin_call("")

    def _pass(self, mark: str, after: str) -> list[Event]:
        """Go on to the part of the text after a mark."""
        events = [] if after == CALL else self._unblank()
        self._text = self._text[len(mark) :]
        self._place += len(mark)
        if after == CALL:
            self._begin_call(mark)
        elif self._part == CALL:
            return self._end_call(mark, is_whole=True)
        else:
            self._blank = ""
        self._part = after
        if after == ANSWER:
            self._begin_answer()
        return events

    def _take(self, num_chars: int) -> list[Event]:
        """Show or read so much of the text, by the part that it belongs to."""
        piece, self._text = self._text[:num_chars], self._text[num_chars:]
        start, self._place = self._place, self._place + num_chars
        if not piece:
            return []
        if self._part == THOUGHT:
            return [TextPiece(piece, True, self._logprobs.take(start, self._place))]
        if self._part == ANSWER:
            waits = self._has_calls and self._blank is not None and piece.isspace()
            self._blank = (self._blank or "") + piece
            return [] if waits else self._unblank()
        if self._call is None:
            return []
        events = self._call.feed(piece)
        self._blank = "" if events else self._blank
        if self._call.is_full:
            events += self._end_call("", is_whole=True)
        return events

    def _unblank(self) -> list[Event]:
        """Show the blanks that an answer begins with; nothing where only calls are wanted."""
        text, self._blank = self._blank, None
        if not text or self._is_forced:
            return []
        return [TextPiece(text, logprobs=self._logprobs.take(self._place - len(text), self._place))]

    def _begin_call(self, mark: str) -> None:
        is_single = not (self._request.parallel_calls and mark)
        parse = self._tokenizer.tool_parser if mark else parse_tool_call
        self._call = CallReader(parse, self._tools, self._num_begun, mark, is_single)
        self._call_place = self._place - len(mark)
        self._part_before_call, self._part = self._part, CALL

    def _end_call(self, mark: str, *, is_whole: bool) -> list[Event]:
        """The last events of a call; if there was none its text is read again, as text."""
        call, self._call = self._call, None
        assert call is not None
        events = call.close(mark, is_whole=is_whole)
        if self._is_forced:
            events = [
                replace(event, text="") if isinstance(event, CallBroken) else event
                for event in events
            ]
        self.num_calls += call.num_whole
        self._num_begun = call.index
        if call.is_full:
            self._is_cut, self.ended = True, "tool_calls"
        if call.is_broken and (seen := self._logprobs.take(self._call_place, self._place)):
            events.append(TextPiece("", logprobs=seen))
        is_call = call.num_whole or call.is_broken
        if is_call and self._part_before_call == THOUGHT:
            # many go on after a call as if its thought had ended; its mark may come yet
            self._marks[ANSWER].setdefault(self._tokenizer.think_end, ANSWER)
        self._part = ANSWER if is_call else self._part_before_call
        self._blank = "" if is_call else self._blank
        self._text = call.left + self._text
        self._place -= len(call.left)
        return events

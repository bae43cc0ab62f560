"""What a protocol hands to the engine, a `TextRequest`, and the events that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_mlx.drafters.grammar import Grammar
    from specdec_mlx.stats.account import SpeculationStats


Object = dict[str, Any]
"""A JSON object."""

# tool choices that are no tool's name
AUTO, NONE, REQUIRED = "auto", "none", "required"


class RequestError(ValueError):
    """A request that cannot be served, in words for the client.

    Attributes:
        code: OpenAI's name for it, as "context_length_exceeded"; None for none.
        num_tokens, most: of a prompt that does not fit, for clients that look for both numbers.
        status: of the reply.
        param: the field that is wrong, where one is.
    """

    def __init__(
        self,
        words: str,
        code: str | None = None,
        num_tokens: int = 0,
        most: int = 0,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> None:
        super().__init__(words)
        self.code, self.num_tokens, self.most = code, num_tokens, most
        self.status, self.param = status, param


class BodyError(RequestError):
    """Headers or a body that are not read to their end, or a body that is no JSON object."""


class UnavailableError(RuntimeError):
    """A request that could be served at another time."""


class ServerBusyError(UnavailableError):
    """The machine has no time for a request."""

    def __init__(self, words: str) -> None:
        super().__init__(f"{words} The machine is busy. Send the request again later.")


class ServerEndingError(UnavailableError):
    """A request is ended because the server is."""

    def __init__(self) -> None:
        super().__init__("The server is ending. Send the request again when it is back.")


@dataclass(kw_only=True)
class TextRequest:
    """One text to write, whatever protocol asked for it.

    Args:
        model: its name or folder; "" is the model that the server was started with.
        adapter: folder of an adapter; None is the one that belongs to the model's name.
        draft_model: name or folder; None is the server's own.
        messages: a chat, as chat templates take it; None for a `prompt`.
        pictures: files of the pictures in the messages, by the SHA-256 of their bytes.
        prompt: text or token ids to continue.
        tools: OpenAI's form, {"type": "function", "function": {...}}.
        tool_choice: "auto", "none", "required", or the name of the one tool to call.
        parallel_calls: False ends the text after its first call.
        template: further names for the chat template (`enable_thinking`, ...).
        continues: the last message is the assistant's, and the text goes on in it.
        max_tokens: None for as many as fit.
        stop: the text ends before the first of these.
        sampling: arguments of `Sampling` that the request or a flag gives; the model's own
            generation config gives the rest.
        penalties: keyword arguments of `mlx_lm.sample_utils.make_logits_processors`.
        seed: None draws one.
        num_logprobs: alternatives to report beside each token; None reports nothing.
        grammar: what the answer must match; None for any text.
        thought_budget: most tokens of the thought before an answer; None for any number.
        prediction: a text that the answer is expected to resemble.
        echo: give the prompt back before the text.
        drafters: names to try in order; None for the server's own choice.
        num_draft_tokens, rule: None for the server's own.
        user, key: whose memory is written and read.
    """

    model: str = ""
    adapter: str | None = None
    draft_model: str | None = None
    messages: list[Object] | None = None
    pictures: dict[str, bytes] = field(default_factory=dict)
    prompt: str | list[int] = ""
    tools: list[Object] = field(default_factory=list)
    tool_choice: str = AUTO
    parallel_calls: bool = True
    template: Object = field(default_factory=dict)
    continues: bool = False
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    sampling: Object = field(default_factory=dict)
    penalties: Object = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None
    grammar: Grammar | None = None
    thought_budget: int | None = None
    prediction: str = ""
    echo: bool = False
    drafters: Sequence[str] | None = None
    num_draft_tokens: int | str | None = None
    rule: str | None = None
    user: str = ""
    key: str = ""

    @property
    def offered_tools(self) -> list[Object]:
        """The tools that the chat template shows, and that a text may call."""
        return [] if self.tool_choice == NONE else self.tools

    @property
    def is_forced(self) -> bool:
        """True if the text must be a call: of any tool, or of the one that `tool_choice` names."""
        return bool(self.tools) and self.tool_choice not in (AUTO, NONE)

    @property
    def has_grammar(self) -> bool:
        """True if the answer is kept to a grammar."""
        return self.grammar is not None or self.is_forced


@dataclass(frozen=True)
class TokenLogprob:
    """A written token.

    Attributes:
        data: text of the token as bytes.
        top: id, text and log-probability of the likeliest tokens, the likeliest first.
    """

    token: int
    data: bytes
    logprob: float
    top: Sequence[tuple[int, bytes, float]] = ()


@dataclass(frozen=True)
class PromptProgress:
    """How far the prompt is read.

    Attributes:
        done: tokens in the caches, of `total`.
        num_cached: tokens that were found in caches at the beginning.
    """

    done: int
    total: int
    num_cached: int


@dataclass(frozen=True)
class TextPiece:
    """A piece of the answer, or with `is_thought` of the thoughts before it."""

    text: str
    is_thought: bool = False
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class CallBegan:
    """A call of a tool.

    Attributes:
        index: among the calls of the text, from 0.
        text: first characters of the arguments.
    """

    index: int
    id: str
    name: str
    text: str = ""


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments; so far they could become an object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallBroken:
    """The call that began last is no call: it was cut, or its arguments are no JSON.

    A stream has then sent the beginning of an object. The reason at the end is not "tool_calls".

    Attributes:
        text: the whole call as it was written, which becomes part of the answer.
    """

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """The end of a text.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        stop: the stop string that ended the text.
        num_written: tokens of the text with its end token.
        num_thought: tokens of the thought.
        accepted: draft tokens in the text.
        rejected: draft tokens that were not kept.
        model, drafter, is_batched, stats: how the text was written.
    """

    reason: str
    stop: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_written: int = 0
    num_thought: int = 0
    accepted: int = 0
    rejected: int = 0
    model: str = ""
    drafter: str = ""
    is_batched: bool = False
    stats: SpeculationStats | None = None


@dataclass(frozen=True)
class Failed:
    """Nothing more comes, for a reason."""

    error: Exception


Event = PromptProgress | TextPiece | CallBegan | CallArguments | CallBroken | Ended | Failed


@dataclass
class Transcript:
    """All events of one text, put together; `ended` once it has ended.

    Attributes:
        events: in their order. A call that broke is text.
    """

    text: str = ""
    thoughts: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event; raises the error of `Failed`."""
        if isinstance(event, CallBroken):
            self.calls.pop()
            while not isinstance(self.events.pop(), CallBegan):
                pass
            event = TextPiece(event.text)
        self.events.append(event)
        match event:
            case TextPiece():
                if event.is_thought:
                    self.thoughts += event.text
                else:
                    self.text += event.text
                self.logprobs += event.logprobs
            case CallBegan():
                call = {"id": event.id, "name": event.name, "arguments": event.text}
                self.calls.append(call)
            case CallArguments():
                self.calls[-1]["arguments"] += event.text
            case Ended():
                self.ended = event
            case Failed():
                raise event.error

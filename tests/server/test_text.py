"""One text between tokens and events: stop strings, thoughts, calls, log-probabilities, counts."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from pydantic_core import from_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from written_texts import (
    CALL,
    END,
    THINK,
    TOOLS,
    UNCALL,
    UNTHINK,
    cut,
    events_of,
    said,
    tokenizer,
    written,
)

from specdec_mlx.server.requests import (
    CallArguments,
    CallBegan,
    CallBroken,
    Ended,
    TextPiece,
    TextRequest,
    Transcript,
)
from specdec_mlx.server.text.calls import PIECE
from specdec_mlx.server.text.logprobs import token_bytes
from specdec_mlx.server.text.state import TextState
from specdec_mlx.stop_strings import StopStrings

texts = st.text("ab<>.\n é🎉", max_size=24)
stops = st.lists(st.text("ab<>.\né", min_size=1, max_size=4), max_size=3)
seeds = st.none() | st.integers(0, 5)


def before_stop(text: str, strings: list[str]) -> str:
    """Reference: the text before the place where the first stop string begins."""
    return text[: min((text.find(stop) for stop in strings if stop in text), default=len(text))]


@given(texts, stops, st.integers(1, 5))
def test_a_text_ends_before_its_first_stop_string_in_whatever_pieces_it_comes(
    text: str, strings: list[str], size: int
) -> None:
    matcher = StopStrings(strings)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    shown = "".join(map(matcher.add, pieces)) + matcher.finish()
    assert shown == before_stop(text, strings)
    assert (matcher.matched is None) == (shown == text)
    assert matcher.matched is None or text[len(shown) :].startswith(matcher.matched)


@given(texts, stops, seeds, st.booleans())
def test_an_answer_ends_before_its_first_stop_string_in_whatever_tokens_it_comes(
    text: str, strings: list[str], seed: int | None, ends: bool
) -> None:
    whole = written(text + END * ends, seed, stop=strings)
    text = text.removeprefix(" ")  # which detokenizers drop
    shown = before_stop(text, strings)
    reason = "stop" if ends or shown != text else "length"
    assert whole.ended is not None
    assert (whole.text, whole.ended.reason) == (shown, reason)
    assert (whole.ended.stop is None) == (shown == text)


STOPS = ["bé", "abé."], ["é", "bé.c"], ["abéx", "é."], ["b", "ab"], ["c", "é.cd"], ["é.x"]


@pytest.mark.parametrize("strings", STOPS)
def test_the_stop_string_that_begins_first_ends_the_text_in_every_split(strings: list[str]) -> None:
    """All splits of the text's bytes into tokens, inside of characters too."""
    text = "abé.cd"
    spelled = "".join(pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0])
    size = len(spelled)
    words = {spelled[i:j] for i in range(size) for j in range(i + 1, size + 1)}
    vocab = {word: i for i, word in enumerate(sorted(words))}
    own = Tokenizer(models.BPE(vocab, []))
    own.decoder = decoders.ByteLevel()
    wrapper = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=own), BPEStreamingDetokenizer, eos_token_ids=[-1]
    )
    for bits in range(2 ** (size - 1)):
        ends = [i + 1 for i in range(size - 1) if bits >> i & 1] + [size]
        starts = [0, *ends[:-1]]
        state = TextState(wrapper, TextRequest(prompt="", stop=strings), [], False)
        whole = Transcript()
        for start, end in zip(starts, ends, strict=True):
            for event in state.add(vocab[spelled[start:end]], None, False):
                whole.add(event)
            if state.ended:
                break
        for event in state.end(state.ended or "length"):
            whole.add(event)
        assert whole.text == before_stop(text, strings), (bits, whole.text)


parts = st.lists(
    st.one_of(
        st.text("ab<> \n", max_size=5),
        st.sampled_from([THINK, UNTHINK, CALL, UNCALL, "<tool_c", "</thi"]),
        st.sampled_from(
            [
                f'{CALL}{{"name": "f", "arguments": {{"a": 1}}}}{UNCALL}',
                f'{CALL}\n{{"name": "f", "arguments": {{"b": "<>"}}}}\n{UNCALL}',
                '{"name": "f", "arguments": {"a": ',
                f"{CALL}[1]{UNCALL}",
            ]
        ),
    ),
    max_size=6,
).map("".join)


@given(parts, stops, st.integers(0, 5), st.booleans(), st.booleans())
def test_what_is_seen_does_not_depend_on_how_a_text_was_cut_into_tokens(
    text: str, strings: list[str], seed: int, ends: bool, in_thought: bool
) -> None:
    how: dict[str, Any] = {"stop": strings, "tools": TOOLS, "in_thought": in_thought}
    text = "." + text + END * ends
    assert said(written(text, None, **how)) == said(written(text, seed, **how))


@given(parts, seeds)
def test_without_tools_and_stop_strings_nothing_but_marks_of_thoughts_is_lost(
    text: str, seed: int | None
) -> None:
    whole = written("." + text + END, seed)
    marks = text.count(THINK) + text.count(UNTHINK)
    lost = len(text) + 1 - len(whole.text) - len(whole.thoughts)
    assert 0 <= lost <= marks * len(UNTHINK)
    assert lost or not whole.thoughts


@given(parts, stops, seeds, st.none() | st.integers(0, 4))
def test_a_completion_has_no_thoughts_and_no_calls(
    text: str, strings: list[str], seed: int | None, num_logprobs: int | None
) -> None:
    whole = written("." + text + END, seed, stop=strings, messages=None, prompt="go", tools=TOOLS)
    assert whole.text == before_stop("." + text, strings)
    assert not whole.thoughts
    assert not whole.calls


CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "stop inside a token": ("alpha.\nyes", {"stop": ["\n"]}, "alpha.", "stop"),
    "stop of two tokens that overlap": ("thaba gamma", {"stop": ["ba g"]}, "tha", "stop"),
    "stop at the limit": ("donXY more", {"stop": ["XY"], "most": 5}, "don", "stop"),
    "half of a stop at the limit": ("donXY more", {"stop": ["XY"], "most": 4}, "donX", "length"),
    "limit": ("don more", {"most": 3}, "don", "length"),
    "tail before the end token": ("if a <" + END, {}, "if a <", "stop"),
    "tail that begins a stop": ("it ##" + END, {"stop": ["###"]}, "it ##", "stop"),
    "tail that begins a thought": ("it </thin" + END, {}, "it </thin", "stop"),
    "tail that begins a call": ("it <tool" + END, {"tools": TOOLS}, "it <tool", "stop"),
    "space before the end token": ("name: " + END, {}, "name: ", "stop"),
    "text after the end token": ("yes." + END + "junk", {}, "yes.", "stop"),
    "half a character at the limit": ("né", {"most": 2}, "n\ufffd", "length"),
    "characters of many tokens": ("Grüße 👋🏽 日本 ❤️‍🔥" + END, {}, "Grüße 👋🏽 日本 ❤️‍🔥", "stop"),
    "stop in a thought": (f"a.b{UNTHINK}c.d", {"stop": ["."], "in_thought": True}, "c", "stop"),
    "shorter of two stops": ("abcd", {"stop": ["bcd", "bc"]}, "a", "stop"),
    "stop around another": ("aabb", {"stop": ["ab", "aabb"]}, "", "stop"),
    "stop that never came around another": ("aabx", {"stop": ["ab", "aabb"]}, "a", "stop"),
    "empty stop": ("ab" + END, {"stop": [""]}, "ab", "stop"),
    "no text": (END, {}, "", "stop"),
    "nothing at all": ("", {}, "", "length"),
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("case", CASES)
def test_the_end_of_a_text(case: str, seed: int | None) -> None:
    text, how, shown, reason = CASES[case]
    whole = written(text, None if "most" in how else seed, **how)
    assert whole.ended is not None
    assert (whole.text, whole.ended.reason) == (shown, reason)


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    tokens = cut("ab.cd.\nef")
    assert [
        event.text for event in events_of(tokens, stop=[".\n"]) if isinstance(event, TextPiece)
    ] == [
        *("a", "b"),
        *(".c", "d"),
    ]


# --- calls -------------------------------------------------------------------------------------


def call(arguments: str, name: str = "f") -> str:
    return f'{CALL}{{"name": "{name}", "arguments": {arguments}}}{UNCALL}'


def test_calls_side_by_side() -> None:
    whole = written(call('{"a": 1}') + call('{"a": 2}') + END, tools=TOOLS)
    calls = [("f", '{"a": 1}'), ("f", '{"a": 2}')]
    assert said(whole) == ("", "", calls, "tool_calls", None)
    ids = {one["id"] for one in whole.calls}
    assert len(ids) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)  # as Mistral's templates want them


def test_a_thought_then_a_call() -> None:
    text = f"hm{UNTHINK}\n{call('{}')}\n{END}"
    assert said(written(text, tools=TOOLS, in_thought=True)) == (
        *("", "hm", [("f", "{}")]),
        *("tool_calls", None),
    )


def test_blanks_beside_a_call_are_dropped_and_those_of_a_text_are_not() -> None:
    text = f"\n\n so\n{call('{}')}\n\n{call('{}')}\n{END}"
    assert written(text, tools=TOOLS).text == "\n\n so\n"
    assert written(f"\n {END}", tools=TOOLS).text == "\n "


def test_one_call_is_enough_without_parallel_calls() -> None:
    text = call('{"a": 1}') + call('{"a": 2}') + END
    whole = written(text, tools=TOOLS, parallel_calls=False)
    assert said(whole)[2:] == ([("f", '{"a": 1}')], "tool_calls", None)
    assert whole.ended is not None
    assert whole.ended.num_written < len(cut(call('{"a": 1}')))


TEXTS = {
    "no object": f"{CALL}[1, 2]{UNCALL}ok",
    "no JSON": f"{CALL}{{name: f}}{UNCALL}ok",
    "no tool": call('{"a": 1}', "g"),
    "no arguments": call("[1]") + "ok",
    "text for arguments": call('"abc"'),
    "nothing": f"{CALL}{UNCALL}ok",
    "name that is a list": f'{CALL}{{"name": ["f"], "arguments": {{}}}}{UNCALL}',
    "number that is none": f'{CALL}{{"arguments": {{"a": NaN}}, "name": "f"}}{UNCALL}',
    "too deep": f'{CALL}{{"name": "f", "arguments": {"[" * 9999}{UNCALL}',
    "broken arguments": call('{"a": 1,}') + "ok",
    "arguments without an end": f'so {CALL}{{"name": "f", "arguments": {{"a": 1{UNCALL}ok',
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("seed", [None, 0])
def test_a_call_that_is_none_is_text(case: str, seed: int | None) -> None:
    text = TEXTS[case]
    assert said(written(text + END, seed, tools=TOOLS)) == (text, "", [], "stop", None)


def test_a_call_in_a_thought_that_is_none_is_thought() -> None:
    text = f"a {CALL} b"
    whole = written(f"{text}{UNTHINK}c{END}", tools=TOOLS, in_thought=True)
    assert said(whole) == ("c", text, [], "stop", None)
    whole = written(f"a {call('{}')}{END}", tools=TOOLS, in_thought=True)
    assert said(whole) == ("", "a ", [("f", "{}")], "tool_calls", None)


def test_a_call_after_the_mark_of_one_that_was_none() -> None:
    whole = written(f"As in {CALL} see: {call('{}')}{END}", tools=TOOLS)
    assert said(whole) == (f"As in {CALL} see: ", "", [("f", "{}")], "tool_calls", None)


def test_a_call_without_its_last_mark_is_one_unless_it_was_cut() -> None:
    text = call('{"a": 1}').removesuffix(UNCALL)
    assert said(written(text + END, tools=TOOLS))[2:4] == ([("f", '{"a": 1}')], "tool_calls")
    text = f'{CALL}{{"arguments": {{"a": 1}}, "name": "f"}}'  # which comes whole, at its end
    assert said(written(text + END, tools=TOOLS))[2:4] == ([("f", '{"a": 1}')], "tool_calls")
    assert said(written(text, tools=TOOLS)) == (text, "", [], "length", None)


@pytest.mark.parametrize("num_kept", range(1, 46))
def test_a_call_that_the_limit_cuts_is_text(num_kept: int) -> None:
    text = "so " + call('{"a": 12, "b": "xyz"}')
    whole = written(text[: 3 + len(CALL)] + text[3 + len(CALL) :][:num_kept], tools=TOOLS)
    is_call = text[3 + len(CALL) :][:num_kept].count("}")
    shown = "so " if is_call else text[: 3 + len(CALL) + num_kept]
    assert (whole.text, len(whole.calls)) == (shown, is_call)
    assert whole.ended is not None
    assert whole.ended.reason == "length"


def test_without_tools_a_call_is_text() -> None:
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "messages": None}):
        assert said(written(call("{}") + END, **asked)) == (call("{}"), "", [], "stop", None)


@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=6),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ),
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([None, 2]),
    seeds,
)
def test_arguments_come_in_pieces_and_are_the_models_own_text(
    arguments: dict[str, Any], ascii_only: bool, indent: int | None, seed: int | None
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    events = list(events_of(cut(call(text) + END, seed), tools=TOOLS))
    first, *pieces = [event for event in events if isinstance(event, CallBegan | CallArguments)]
    assert first.text + "".join(piece.text for piece in pieces) == text
    assert isinstance(first, CallBegan)
    assert all(isinstance(piece, CallArguments) for piece in pieces)
    assert pieces or len(text) < 2 * PIECE


@pytest.mark.parametrize("seed", [None, 0])
def test_marks_in_a_string_of_the_arguments_are_text(seed: int | None) -> None:
    arguments = json.dumps({"b": THINK + CALL + '"' + UNCALL + "x", "a": 1})
    whole = written(call(arguments) + "ok" + END, seed, tools=TOOLS)
    assert said(whole) == ("ok", "", [("f", arguments)], "tool_calls", None)
    broken = call('{"b": "x') + "ok"
    assert said(written(broken + END, seed, tools=TOOLS)) == (broken, "", [], "stop", None)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (r'{"b": "\d+"}', r'{"b": "\\d+"}'),
        ('{"b": "x\ny\t"}', r'{"b": "x\ny\t"}'),
        (r'{"b": "\"\\\u00e9\n"}', r'{"b": "\"\\\u00e9\n"}'),
        ('{"b": "\\\n"}', r'{"b": "\\\n"}'),
        (r'{"b": "C:\users\u12"}', r'{"b": "C:\\users\\u12"}'),
        (r'{"b": "\u\u00e9\ud83d"}', r'{"b": "\\u\u00e9\ud83d"}'),
    ],
)
def test_what_models_forget_to_escape_is_escaped(wrong: str, right: str) -> None:
    whole = written(call(wrong) + END, tools=TOOLS)
    assert said(whole)[2:4] == ([("f", right)], "tool_calls")
    json.loads(right)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_thought_may_end_after_the_call_in_it(seed: int | None) -> None:
    """What comes after the call is the answer, whether the thought's mark comes or not."""
    asked: dict[str, Any] = {"tools": TOOLS, "in_thought": True}
    for between in (UNTHINK, ""):
        whole = written(f"hm {call('{}')}{between}ok{END}", seed, **asked)
        assert said(whole) == ("ok", "hm ", [("f", "{}")], "tool_calls", None)
    stopped = written(f"hm {call('{}')}{UNTHINK}ok.no{END}", seed, stop=["."], **asked)
    assert said(stopped) == ("ok", "hm ", [("f", "{}")], "tool_calls", ".")


def test_arguments_may_have_llamas_name() -> None:
    text = f'{CALL}{{"name": "f", "parameters": {{"a": 1}}}}{UNCALL}'
    assert said(written(text + END, tools=TOOLS))[2:4] == ([("f", '{"a": 1}')], "tool_calls")


LONG = '{"b": "' + "x" * PIECE + '"'
BROKEN = [
    '{"a": tru}',
    '{"a": 01}',
    '{"a": NaN}',
    '{"a": 1 2}',
    '{"a": 1,}',
    '{"a" 1}',
    '{"a": [1}}',
    '{"a": {"b": 1]}',
    '{"a": ["b": 1]}',
    '{"a": "x" "y"}',
    '{"a",: 1}',
]
TOO_DEEP = '{"a": ' + "[" * 100 + "]" * 100 + "}"


@pytest.mark.parametrize("broken", BROKEN)
def test_a_call_that_breaks_early_is_text_in_a_stream_too(broken: str) -> None:
    for seed in range(3):
        events = [*events_of(cut(call(broken) + call("{}") + END, seed), tools=TOOLS)]
        assert not any(isinstance(event, CallBroken) for event in events)
        whole = Transcript()
        for event in events:
            whole.add(event)
        assert said(whole)[:4] == (call(broken), "", [("f", "{}")], "tool_calls")


@pytest.mark.parametrize("broken", [f"{LONG}, {wrong[1:]}" for wrong in (*BROKEN, TOO_DEEP)])
def test_what_a_stream_has_of_a_call_that_breaks_can_become_an_object(broken: str) -> None:
    for seed in range(3):
        events = [*events_of(cut(call(broken) + call("{}") + END, seed), tools=TOOLS)]
        (told,) = [event for event in events if isinstance(event, CallBroken)]
        assert (told.index, told.text) == (0, call(broken))
        pieces = [e for e in events if isinstance(e, CallBegan | CallArguments) and e.index == 0]
        sent = "".join(piece.text for piece in pieces)
        assert broken.startswith(sent)
        from_json(sent, allow_partial="trailing-strings")
        began = [event.index for event in events if isinstance(event, CallBegan)]
        assert began == [0, 1]
        whole = Transcript()
        for event in events:
            whole.add(event)
        assert said(whole)[:3] == (call(broken), "", [("f", "{}")])


GOOD: dict[str, tuple[str, str]] = {
    "json_tools": (call('{"a": 1, "b": "x y"}'), "}}"),
    "function_gemma": (
        "<start_function_call>call:f{a:1,b:<escape>x y<escape>}<end_function_call>",
        "call:f{",
    ),
    "gemma4": ('<|tool_call>call:f{a:1,b:<|"|>x y<|"|>}<tool_call|>', "call:f{"),
    "glm47": (
        f"{CALL}f<arg_key>a</arg_key><arg_value>1</arg_value>"
        f"<arg_key>b</arg_key><arg_value>x y</arg_value>{UNCALL}",
        "f",
    ),
    "laguna": (
        f"{CALL}f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        f"<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n{UNCALL}",
        "f",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1, "b": "x y"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        '"a": 1',
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="integer"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="string"<|sep|>x y<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        'tool="f"',
    ),
    "longcat": (
        "<longcat_tool_call>f\n<longcat_arg_key>a</longcat_arg_key>\n"
        "<longcat_arg_value>1</longcat_arg_value>\n<longcat_arg_key>b</longcat_arg_key>\n"
        "<longcat_arg_value>x y</longcat_arg_value>\n</longcat_tool_call>",
        "f\n",
    ),
    "minicpm5": (
        '<function name="f"><param name="a">1</param><param name="b">x y</param></function>',
        '"f"',
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">x y</parameter>\n</invoke>\n</minimax:tool_call>',
        '"f"',
    ),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x y"}', "f["),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1'
        '</atem:parameter>\n<atem:parameter name="b">x y</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        '"f"',
    ),
    "pythonic": ('<|tool_call_start|>[f(a=1, b="x y")]<|tool_call_end|>', "f("),
    "qwen3_coder": (
        f"{CALL}\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        f"<parameter=b>\nx y\n</parameter>\n</function>\n{UNCALL}",
        "f>",
    ),
}
"""By mlx-lm's parser: a call of f with a=1 and b="x y", and what makes it one of f."""


def test_all_parsers_of_mlx_lm_are_here() -> None:
    import pkgutil

    from mlx_lm import tool_parsers

    assert set(GOOD) == {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("parser", GOOD)
def test_a_call_in_the_format_of_each_parser(parser: str) -> None:
    text, _ = GOOD[parser]
    whole = written(f"so {text}{END}", tools=TOOLS, how={"parser": parser})
    assert whole.text == "so "
    assert [call["name"] for call in whole.calls] == ["f"]
    assert json.loads(whole.calls[0]["arguments"]) == {"a": 1, "b": "x y"}
    assert whole.ended is not None
    assert whole.ended.reason == "tool_calls"


@pytest.mark.parametrize("parser", GOOD)
def test_a_broken_call_in_the_format_of_each_parser(parser: str) -> None:
    good, essential = GOOD[parser]
    broken = good.replace(essential, "", 1)
    whole = written(f"so {broken}{END}", tools=TOOLS, how={"parser": parser})
    assert said(whole) == (f"so {broken}", "", [], "stop", None)


@pytest.mark.parametrize("parser", GOOD)
def test_a_cut_call_in_the_format_of_each_parser(parser: str) -> None:
    text = GOOD[parser][0]
    for num_kept in (len(text) // 2, len(text) * 3 // 4):
        whole = written(f"so {text[:num_kept]}", tools=TOOLS, how={"parser": parser})
        shown = "" if whole.calls else text[:num_kept]
        assert said(whole)[:2] == (f"so {shown}", "")
        assert not whole.calls or "{" in text[:num_kept]
        assert said(whole)[3:] == ("length", None)


@pytest.mark.parametrize("parser", GOOD)
def test_a_call_of_a_tool_without_parameters_in_the_format_of_each_parser(parser: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = written(GOOD[parser][0] + END, tools=tools, how={"parser": parser})
    assert [call["name"] for call in whole.calls] == ["f"]


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_a_damaged_call_is_a_call_or_the_text_that_was_written(
    parser: str, data: st.DataObject
) -> None:
    text = GOOD[parser][0]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, len(text)))
        text = text[:start] + data.draw(st.text('{}[]"<>:,f1\n', max_size=3)) + text[stop:]
    ending = data.draw(st.sampled_from(["", END]))
    whole = written("." + text + ending, tools=TOOLS, how={"parser": parser})
    assert whole.calls or whole.text == "." + text
    assert {call["name"] for call in whole.calls} <= {"f"}
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in whole.calls)


def test_several_calls_within_one_pair_of_marks() -> None:
    one = 'f[ARGS]{"a": 1}'
    for text in (f"[TOOL_CALLS]{one}{one}", f"[TOOL_CALLS]{one}[TOOL_CALLS]{one}\n"):
        whole = written(text + END, tools=TOOLS, how={"parser": "mistral"})
        assert said(whole)[:3] == ("", "", [("f", '{"a": 1}')] * 2)
    listed = json.dumps([{"name": "f", "arguments": {"a": 1}, "id": "123456789"}] * 2)
    whole = written(f"[TOOL_CALLS]{listed}{END}", tools=TOOLS, how={"parser": "mistral"})
    assert said(whole)[:3] == ("", "", [("f", '{"a": 1}')] * 2)
    assert whole.calls[1]["id"] == "123456789"
    begin, middle = "<|tool_call_begin|>functions.f:", "<|tool_call_argument_begin|>"
    section = "".join(f"{begin}{i}{middle}{{}}<|tool_call_end|>" for i in (3, 4))
    text = f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>{END}"
    whole = written(text, tools=TOOLS, how={"parser": "kimi_k2"})
    assert said(whole)[:3] == ("", "", [("f", "{}")] * 2)
    assert [call["id"] for call in whole.calls] == ["functions.f:3", "functions.f:4"]


def test_text_after_calls_that_have_no_last_mark() -> None:
    whole = written(
        f"[TOOL_CALLS]f[ARGS]{{}} and so on{END}", tools=TOOLS, how={"parser": "mistral"}
    )
    assert said(whole)[:3] == ("and so on", "", [("f", "{}")])


# --- log-probabilities and counts --------------------------------------------------------------


def rows(tokens: list[int], num: int) -> list[mx.array]:
    """Made-up log-probabilities [V] a token."""
    width = len(tokenizer())
    return [mx.log(mx.softmax(mx.random.normal([width], key=mx.random.key(i)))) for i in range(num)]


def of_events(tokens: list[int], **how: Any) -> tuple[list[Any], list[Any]]:
    """Events of a text with log-probabilities, and all entries in them."""
    told = list(
        events_of(tokens, num_logprobs=3, logprobs=rows(tokens, len(tokens)), tools=TOOLS, **how)
    )
    return told, [
        entry for event in told if isinstance(event, TextPiece) for entry in event.logprobs
    ]


def test_log_probabilities_are_of_the_written_tokens_and_sorted() -> None:
    tokens = cut("the ab é🎉" + END, 0)
    _, entries = of_events(tokens)
    assert [entry.token for entry in entries] == tokens
    assert b"".join(entry.data for entry in entries[:-1]).decode() == "the ab é🎉"
    for entry, row in zip(entries, rows(tokens, len(tokens)), strict=True):
        assert entry.logprob == row[entry.token].item()
        values = [value for _, _, value in entry.top]
        assert values == sorted(row.tolist(), reverse=True)[:3]
        assert [row[index].item() for index, _, _ in entry.top] == values


@given(texts, stops, seeds)
def test_each_token_that_is_seen_has_its_log_probability(
    text: str, strings: list[str], seed: int | None
) -> None:
    text = "." + text
    tokens = cut(text + END, seed)
    _, entries = of_events(tokens, stop=strings)
    shown = before_stop(text, strings).encode()
    place, expected = 0, []
    for token in tokens:
        if place < len(shown) or len(shown) == len(text.encode()):
            expected.append(token)
        place += len(token_bytes(tokenizer(), token))
    assert [entry.token for entry in entries] == expected


def test_log_probabilities_come_with_the_text_of_their_tokens() -> None:
    tokens = cut("ab.cd 🎉.")
    told, _ = of_events(tokens, stop=[".\n"])
    pieces = [(event.text, len(event.logprobs)) for event in told if isinstance(event, TextPiece)]
    assert pieces == [("a", 1), ("b", 1), (".c", 2), ("d", 1), (" 🎉", 5), (".", 1)]


def test_a_token_after_a_held_space_is_not_seen_if_it_begins_a_stop_string() -> None:
    tokens = cut("a stop é")
    _, entries = of_events(tokens, stop=["stop"])
    assert [entry.token for entry in entries] == tokens[:2]
    _, entries = of_events(tokens, stop=["é"])
    assert [entry.token for entry in entries] == tokens[:7]


def test_the_end_token_is_not_seen_after_a_stop_string_that_is_decided_with_it() -> None:
    tokens = cut(".b" + END)
    _, entries = of_events(tokens, stop=["b", ".b<"])
    assert [entry.token for entry in entries] == tokens[:1]


def test_log_probabilities_of_marks_and_calls_are_not_shown_but_those_of_broken_calls_are() -> None:
    text = f"a{UNTHINK}b{call('{}')}c"
    told, entries = of_events(cut(text), in_thought=True)
    assert [(event.text, event.is_thought) for event in told if isinstance(event, TextPiece)] == [
        *(("a", True), ("b", False)),
        ("c", False),
    ]
    assert b"".join(entry.data for entry in entries) == b"abc"
    for broken in (f"b{CALL}[1]{UNCALL}c", f"b{call('{,}')}c"):
        _, entries = of_events(cut(broken))
        assert b"".join(entry.data for entry in entries).decode() == broken


def test_what_a_grammar_forbids_is_no_alternative() -> None:
    tokens = cut("a")
    row = mx.where(mx.arange(len(tokenizer())) == tokens[0], 0.0, -mx.inf)
    event = next(iter(events_of(tokens, num_logprobs=5, logprobs=[row])))
    assert isinstance(event, TextPiece)
    assert [index for index, _, _ in event.logprobs[0].top] == tokens


def test_counts_are_of_what_was_written() -> None:
    text = f"hm{UNTHINK}done." + END
    whole = written(text + "more", in_thought=True)
    assert whole.ended is not None
    assert whole.ended.num_written == len(cut(text))
    assert whole.ended.num_thought == 3


def test_accepted_tokens_are_no_more_than_written_ones() -> None:
    state = TextState(tokenizer(), TextRequest(messages=[]), [], False)
    for token in cut(f"a.{END}junk{END}"):
        state.add(token, None, True)
    *_, ended = state.end("stop")
    assert isinstance(ended, Ended)
    assert (ended.num_written, ended.accepted) == (3, 3)


def test_a_text_that_goes_on_keeps_its_first_space() -> None:
    def first(before: str, **asked: Any) -> str:
        state = TextState(tokenizer(), TextRequest(**asked), cut(before), False)
        events = [event for token in cut("  b") for event in state.add(token, None, False)]
        return "".join(event.text for event in events if isinstance(event, TextPiece))

    assert first("a", messages=[]) == " b"
    assert first("a", messages=[], continues=True) == "  b"
    assert first("a ", messages=[], continues=True) == "  b"
    assert first("def f():\n", prompt="def f():\n") == "  b"

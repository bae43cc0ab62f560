"""The server takes all flags of mlx-lm's server, by the same names and with the same defaults."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx_lm.server
import pytest

from specdec_mlx.memory.store import PROCESS
from specdec_mlx.server.flags import (
    GIVEN,
    TARGETS,
    ServerSettings,
    make_parser,
    parse_settings,
    parse_size,
)
from specdec_mlx.server.requests import RequestError, TextRequest

OTHERWISE = {
    "max_tokens": None,
    "num_draft_tokens": None,
    "allowed_origins": [],
    **dict.fromkeys(("temp", "top_p", "top_k", "min_p")),
}
"""Defaults that are not mlx-lm's: as many tokens as fit, drafts as long as pays, no web page of the
Internet, and the sampling that the model's makers recommend."""


def actions(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Flags of a parser by name, with their default, their choices, and how many values they take.

    Defaults that are typed as text are parsed, as a parser does.
    """
    defaults = vars(parser.parse_args([]))
    return {
        flag: (action.dest, defaults[action.dest], action.choices, action.nargs)
        for action in parser._actions
        for flag in action.option_strings
        if action.dest != "help"
    }


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that mlx-lm's server makes."""

    class SeenError(Exception):
        pass

    def see(parser: argparse.ArgumentParser, *args: Any) -> Any:
        raise SeenError(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", see)
        patch.setattr(sys, "argv", ["mlx_lm.server"])
        with pytest.raises(SeenError) as seen:
            mlx_lm.server.main()
    parser: argparse.ArgumentParser = seen.value.args[0]
    return parser


def test_every_flag_of_mlx_lms_server_is_taken(theirs: argparse.ArgumentParser) -> None:
    own = actions(make_parser())
    for flag, (dest, default, choices, nargs) in actions(theirs).items():
        default = OTHERWISE.get(dest, default)
        got_dest, got_default, got_choices, got_nargs = own[flag]
        if dest == "allowed_origins":  # a list there
            got_default = list(got_default)
        assert (got_dest, got_default, got_nargs) == (dest, default, nargs), flag
        assert list(got_choices or ()) == list(choices or ()), flag


def test_settings_without_flags_are_the_defaults_of_the_class() -> None:
    said = vars(parse_settings([]))
    flags = said.pop("flags")
    own = vars(ServerSettings())
    assert said == {name: own[name] for name in said}
    assert flags.memory == PROCESS


def test_what_is_one_persons_is_not_everybodys() -> None:
    local, public = (
        parse_settings(["--model", "m"]),
        parse_settings(["--model", "m", "--host", "0.0.0.0"]),
    )
    assert (local.any_model_name, public.any_model_name) == (True, False)
    assert (local.request_models, public.request_models) == ("any", TARGETS)
    assert (local.flags.memory, public.flags.memory) == (PROCESS, None)
    assert not parse_settings(["--model", "m", "--no-any-model-name"]).any_model_name
    assert parse_settings(["--memory", "none"]).flags.memory is None


def test_minus_one_is_no_limit_of_an_answer() -> None:
    assert parse_settings(["--max-tokens", "-1"]).max_tokens is None


def test_sizes_are_bytes() -> None:
    assert [parse_size(text) for text in ("7", "1.5GB", "2 m", "20GB")] == [
        7,
        1_500_000_000,
        2_000_000,
        20_000_000_000,
    ]
    for wrong in ("", "GB", "1B", "-1", "1TB"):
        with pytest.raises(ValueError, match="500MB"):
            parse_size(wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-models", GIVEN], "needs --model"),
        (["--prefill-step-size", "0"], "--prefill-step-size"),
        (["--adapter-path", "nowhere"], "adapter_config.json"),
        (["--chat-template-args", "[1]"], "JSON object"),
        (["--chat-template-args", "x"], "'x': expected JSON."),
        (["--port", "99999"], "'99999': expected an int from 0 to 65535."),
        (["--temp", "-1"], "temp"),
        (["--prompt-cache-bytes", "x"], "500MB"),
        (["--num-speculative-tokens", "3"], "--num-draft-tokens"),
    ],
)
def test_a_wrong_flag_ends_the_command_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_requests_name_only_what_the_start_allows(tmp_path: Path) -> None:
    given = ServerSettings(model=str(tmp_path), request_models=GIVEN)
    assert given.allows_model(str(tmp_path.resolve()))
    assert not given.allows_model("another")
    with pytest.raises(RequestError, match="adapters"):
        given.check(TextRequest(adapter="another"))
    targets = ServerSettings(request_models=TARGETS)
    assert targets.allows_model("another")
    targets.check(TextRequest(draft_model="default_model", adapter="another"))
    with pytest.raises(RequestError, match="draft_model"):
        targets.check(TextRequest(draft_model="another"))
    with pytest.raises(RequestError, match="chat_template"):
        targets.check(TextRequest(template={"chat_template": "x"}))
    ServerSettings(allow_chat_templates=True).check(TextRequest(template={"chat_template": "x"}))

"""Kernels around wide passes: when they are entered, what a probe says, and what is learned."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import tiny
from scripted import PROMPT, OracleDrafter, plain, target
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request
from specdec_mlx.cli.commands import main
from specdec_mlx.draft_length.store import kept_tuning, tuning_for, tuning_with
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.kernels import Kernels, SplitAttention, make_kernels
from specdec_mlx.loop import speculate
from specdec_mlx.mlx_lm_plugin import patched
from specdec_mlx.options import Options
from specdec_mlx.server.flags import parse_settings
from specdec_mlx.server.writers import shared_options

mlx_lm_generate: Any = importlib.import_module("mlx_lm.generate")


class Noted(Kernels):
    """Notes each pass that it is around, and changes the logits by a factor."""

    def __init__(self, factor: float = 1.0, name: str = "noted") -> None:
        self.name, self.factor = name, factor
        self.passes: list[tuple[int, int]] = []
        self.is_inside, self.num_measured = False, 0

    @contextmanager
    def around(self, model: nn.Module, rows: int, context: int) -> Iterator[None]:
        self.passes.append((rows, context))
        linear: Any = nn.Linear
        call, self.is_inside = linear.__call__, True
        linear.__call__ = lambda layer, x: call(layer, x) * self.factor
        try:
            yield
        finally:
            linear.__call__, self.is_inside = call, False

    def measure(self) -> None:
        assert not self.is_inside
        self.num_measured += 1


def written(kernels: Kernels | str | None, model: nn.Module, **how: Any) -> list[int]:
    drafter = OracleDrafter(plain(24, model=model), 128)
    options = {"num_draft_tokens": 4, "max_tokens": 24, "kernels": kernels} | how
    return [token.token for token in speculate(model, PROMPT, drafter, **options)]


def test_every_wide_pass_is_inside_and_no_other() -> None:
    """Rows and context of each pass that verifies; prefills and plain passes are outside."""
    kernels, text = Noted(), plain(24)
    assert written(kernels, target(), probe=False) == text
    # 1 + 4 * 5 + 3 tokens; the first pass has no draft
    assert kernels.passes == [(5, 8), (5, 13), (5, 18), (5, 23), (3, 28)]
    assert kernels.num_measured >= len(kernels.passes)


def test_the_probe_runs_inside() -> None:
    """Exact kernels are probed at 5 and 9 rows, and stay."""
    model, kernels = tiny.build("qwen2"), Noted()
    assert written(kernels, model) == plain(24, model=model)
    assert {rows for rows, context in kernels.passes if context < len(PROMPT)} | {5, 9} == {5, 9}
    probed = [rows for rows, context in kernels.passes if context not in (8, 13, 18, 23, 28)]
    assert probed[:2] == [5, 9]


def test_kernels_with_other_logits_are_left_out_and_drafts_stay() -> None:
    """A factor of 1.01 on each product is no rounding: a warning, and the target's own text."""
    model, kernels = tiny.build("qwen2"), Noted(factor=1.01, name="wrong")
    with pytest.warns(UserWarning, match="gives other logits on the kernels 'wrong'"):
        assert written(kernels, model) == plain(24, model=model)
    num_probes = len(kernels.passes)
    assert written(kernels, model) == plain(24, model=model)
    assert len(kernels.passes) == num_probes
    # other kernels, and none, are judged by themselves
    right = Noted()
    assert written(right, model) == written(None, model) == plain(24, model=model)
    assert len(right.passes) > 2


def test_passes_of_a_batch_are_inside() -> None:
    """The rows of all texts count, and the context is the longest."""
    kernels, prompts = Noted(), [PROMPT, PROMPT[:5], PROMPT[2:]]
    expected = [plain(16, prompt) for prompt in prompts]
    texts = {tuple(prompt): text for prompt, text in zip(prompts, expected, strict=True)}
    drafter = OracleDrafter(lambda prompt: texts[tuple(prompt)], 128)
    how = Options(num_draft_tokens=3, kernels=kernels, probe=False)
    batch = BatchGeneration(target(), drafter, how)
    for prompt in prompts:
        batch.insert(Request(prompt, 16))
    tokens: dict[int, list[int]] = {}
    for item in batch.run():
        tokens.setdefault(item.uid, []).append(item.token.token)
    assert [*tokens.values()] == expected
    # the first pass has a row of each text, and then each row has three draft tokens
    assert kernels.passes[0] == (3, max(map(len, prompts)) - 1)
    assert {rows for rows, _ in kernels.passes[1:-1]} == {3 * 4}
    assert kernels.num_measured


def test_costs_and_saved_tunings_are_kept_apart_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of one name share what was learned, in memory and on disk."""
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path))
    model = tiny.build("qwen2")
    with kept_tuning(model, "some/name", None, Noted()), kept_tuning(model, "some/name"):
        tuning_with(model, Noted()).cost_model(0).add(1, 0.01)
        tuning_with(model, Noted()).cost_model(0).add(5, 0.012)
        tuning_with(model, Noted()).cost_model(0).add(5, 0.012)
    assert tuning_for(model) is not tuning_with(model, Noted())
    assert not tuning_for(model).cost_model(0).ratios
    again = tiny.build("qwen2")
    with kept_tuning(again, "some/name"):
        assert not tuning_for(again).cost_model(0).ratios
    with kept_tuning(again, "some/name", None, Noted(name="others")):
        assert not tuning_with(again, Noted(name="others")).cost_model(0).ratios
    with kept_tuning(again, "some/name", None, Noted()):
        assert tuning_with(again, Noted()).cost_model(0).ratios


def test_names() -> None:
    """None and "none" are no kernels; one name is one object; errors name the next step."""
    assert make_kernels(None) is make_kernels("none") is None
    assert make_kernels("split") is make_kernels("split")
    assert isinstance(make_kernels("split"), SplitAttention)
    assert make_kernels("auto") is not None
    with pytest.raises(UnknownNameError, match="auto, split, mlx-dspark, none"):
        make_kernels("splitt")
    with pytest.raises(ValueError, match="kernels=3: expected None, a name or"):
        written(3, target())  # type: ignore[arg-type]


def test_without_kernels_a_pass_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of the room is called."""

    def never(*args: Any, **more: Any) -> None:
        raise AssertionError

    for name in ("kernels_around", "within"):
        monkeypatch.setattr(f"specdec_mlx.target.{name}", never)
    monkeypatch.setattr("specdec_mlx.loop.Generation.measure_kernels", never)
    assert written(None, target()) == plain(24)


def test_mlx_lms_calls_the_commands_and_the_server_take_kernels() -> None:
    """Every pass of a patched call with a draft is inside; flags make the options."""
    kernels, text = Noted(), plain(24)
    drafter = OracleDrafter(text, 128)
    with patched(drafter, num_draft_tokens=4, kernels=kernels):
        steps = mlx_lm_generate.generate_step(mx.array(PROMPT), target(), max_tokens=24)
        assert [token for token, _ in steps] == text
    assert (5, 8) in kernels.passes
    settings = parse_settings(["--model", "m", "--kernels", "split"])
    loaded: Any = SimpleNamespace(tokenizer=None)
    assert shared_options(loaded, settings).kernels is make_kernels("split")
    assert shared_options(loaded, parse_settings(["--model", "m"])).kernels is None


def test_the_doctor_says_which_kernels_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each, with the reason if one cannot."""
    main(["doctor"])
    shown = re.findall(r"^kernels +(.*)$", capsys.readouterr().out, re.M)
    split, others = shown
    assert split.startswith("split: can run")
    assert others.startswith("mlx-dspark: off: ") or "can run" in others

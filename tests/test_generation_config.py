"""The sampling that makers recommend is used as far as it is right, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selection import in_one_test
from specdec_mlx.mlx_lm_plugin.generation_config import described, recommended_sampling

NAMES = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
ARGUMENTS = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
INFINITY = 10**400

CASES: list[tuple[Any, dict[str, Any], list[str]]] = [
    ({**NAMES, "do_sample": True, "eos_token_id": [1, 2]}, ARGUMENTS, []),
    (NAMES, ARGUMENTS, []),
    ({**NAMES, "do_sample": False}, {"temp": 0.0}, []),
    ({"do_sample": True, "top_k": 64}, {"temp": 1.0, "top_k": 64}, []),
    ({"do_sample": True, "temperature": 0}, {"temp": 0}, []),
    ({"eos_token_id": 1, "temperature": None}, {}, []),
    ({"top_k": 20.0, "temperature": 1}, {"top_k": 20, "temp": 1}, []),
    ({"temperature": -1, "top_p": 0.5}, {"top_p": 0.5}, ["temperature -1"]),
    ({"temperature": "hot", "top_p": 1.5}, {}, ["temperature 'hot'", "top_p 1.5"]),
    ({"temperature": float("nan"), "top_k": -1}, {}, ["temperature nan", "top_k -1"]),
    ({"temperature": INFINITY, "top_k": 2.5}, {}, ["temperature 1000", "top_k 2.5"]),
    ({"top_p": True, "min_p": [0.1], "top_k": 5}, {"top_k": 5}, ["top_p True", "min_p [0.1]"]),
    ({"do_sample": "yes", "top_p": 0.5}, {"top_p": 0.5}, ["do_sample 'yes'"]),
    ([1], {}, ["expected an object"]),
]


@in_one_test(("config", "values", "problems"), CASES)
def test_right_values_are_used_and_wrong_values_are_named(
    config: Any, values: dict[str, Any], problems: list[str], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    found, said = recommended_sampling(tmp_path)
    assert found == values
    assert len(said) == len(problems)
    for line, words in zip(said, problems, strict=True):
        assert words in line
        assert line.startswith("generation_config.json")


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(tmp_path: Path) -> None:
    """A model without the file is not warned of."""
    assert recommended_sampling(tmp_path) == recommended_sampling(tmp_path / "none") == ({}, [])
    for content in (b"", b'{"temperature": 0.6', b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "generation_config.json").write_bytes(content)
        values, (problem,) = recommended_sampling(tmp_path)
        assert not values
        assert "cannot be read" in problem


def test_the_values_are_said_in_words() -> None:
    assert described({"temp": 0.6, "top_k": 20}) == (
        "temperature 0.6, top-k 20 (the model's generation_config.json)"
    )

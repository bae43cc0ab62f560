"""The sampling that a model's makers recommend in its generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_mlx.files import read_text
from specdec_mlx.sampling import Sampling

FILE = "generation_config.json"
ARGUMENTS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""Names in the file -> arguments of `Sampling`."""


def recommended_sampling(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Arguments of `Sampling` that a model's folder recommends, and warnings of wrong values.

    `do_sample: false` is greedy decoding. `do_sample: true` without a temperature is temperature 1.
    """
    try:
        config = json.loads(read_text(folder / FILE))
    except (FileNotFoundError, NotADirectoryError):
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{FILE} cannot be read, and is ignored: {error}"]
    if not isinstance(config, dict):
        return {}, [f"{FILE} is ignored: expected an object, got {config!r:.60}."]
    values: dict[str, Any] = {}
    problems = []
    for name, argument in ARGUMENTS.items():
        if (value := config.get(name)) is None:
            continue
        try:
            values[argument] = _checked(argument, value)
        except ValueError as error:
            problems.append(f"{FILE}: {name} {value!r:.60} is ignored ({error})")
    match config.get("do_sample"):
        case False:
            values = {"temp": 0.0}
        case True:
            values = {"temp": 1.0, **values}
        case None:
            pass
        case other:
            problems.append(f"{FILE}: do_sample {other!r:.60} is ignored.")
    return values, problems


def _checked(argument: str, value: Any) -> Any:
    # JSON files of some models have 50.0 for top_k.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    kinds = (int,) if argument == "top_k" else (int, float)
    if type(value) not in kinds:
        raise ValueError(f"expected {'an int' if argument == 'top_k' else 'a number'}")
    Sampling(**{argument: value})
    return value


def described(sampling: Mapping[str, Any]) -> str:
    """Recommended arguments as words: "temperature 0.6, top-p 0.95 (generation_config.json)"."""
    words = {argument: name.replace("_", "-") for name, argument in ARGUMENTS.items()}
    values = [f"{words[argument]} {value}" for argument, value in sampling.items()]
    return f"{', '.join(values)} (the model's {FILE})"

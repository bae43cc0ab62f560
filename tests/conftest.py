"""What all tests share: checked shapes, and how hard Hypothesis tries.

`HYPOTHESIS_PROFILE=thorough pytest` tries many times as many examples.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import shapes

if TYPE_CHECKING:
    from live import Script

TESTS_END_AT = float(os.environ.get("TESTS_END_AT", "inf"))
"""No test starts after this time, in seconds since 1970. Only `.ci/run` sets it."""

NO_TIME_LEFT = "left out, because no time was left"

shapes.install()  # before anything of the package is imported

# No test needs the network; this is read when the library is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Exact tests are in float32, which MLX would shorten in products on an M5 or on NVIDIA's GPUs.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# On the CPU each small function that mlx-lm compiles costs a run of g++, for each type and kind of
# shape. Tests for which it matters ask for it by the fixture `compiled`.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

# What commands learn and keep is not to reach the user's own cache, nor to come from there.
os.environ.setdefault("SPECDEC_MLX_CACHE", tempfile.mkdtemp(prefix="specdec-mlx-tests-"))

# Models take long, and longer on a busy machine: no deadlines. The same examples on every run, so
# that a failure is about the change under test and not about luck.
slow = [HealthCheck.too_slow]
common = settings(deadline=None, derandomize=True, print_blob=True, suppress_health_check=slow)
settings.register_profile("default", common, max_examples=30)
settings.register_profile("thorough", common, max_examples=500, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


from command_line import WAYS, in_this_way  # noqa: E402  after the hook and the environment
from tiny_model_folder import write_model_folder  # noqa: E402


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the commands of a test are run; for `command_line.both_ways`."""
    with in_this_way(request.param):
        yield


@pytest.fixture
def compiled() -> Iterator[None]:
    """mlx-lm's small functions are compiled, as users have them."""
    import mlx.core as mx  # after the environment

    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, for files that need no other."""
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """What Qwen 2 models say in a file."""
    from live import scripted  # clients' packages, which few files need

    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def url(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server over such a model."""
    from live import served

    with served(script, tmp_path_factory.mktemp("models") / "model") as url:
        yield url


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out, its fixtures included, when the time for all tests is over."""
    if time.time() >= TESTS_END_AT:
        pytest.skip(NO_TIME_LEFT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the name of each test that was left out."""
    skipped = terminalreporter.getreports("skipped")
    left_out = sorted(r.nodeid for r in skipped if NO_TIME_LEFT in str(r.longrepr))
    if left_out:
        terminalreporter.section(f"{len(left_out)} tests {NO_TIME_LEFT}")
        terminalreporter.write_line("\n".join(left_out))

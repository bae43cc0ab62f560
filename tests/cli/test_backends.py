"""MLX without a backend, with two, or with one that does not load: said in words, and mended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import specdec_mlx
from selection import in_one_test
from specdec_mlx.cli import backends, blas, doctor
from specdec_mlx.cli.blas import REFERENCE_BLAS, blas_in
from specdec_mlx.cli.commands import main
from specdec_mlx.errors import MissingBackendError

SOURCES = Path(specdec_mlx.__file__).parent.parent
NO_LIBRARY = "libmlx.so: cannot open shared object file: No such file or directory"
CHOOSE = (
    'MLX has no backend here: pip install "specdec-mlx[cpu]", or "specdec-mlx[cuda13]" for an '
    "NVIDIA GPU."
)


def pretend_to_install(folder: Path, **distributions: str) -> None:
    """Metadata of distributions, by name and version, and nothing else of them."""
    for name, number in distributions.items():
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {number}\n"
        (info / "METADATA").write_text(text)


def linux_where_mlx_raises(folder: Path, message: str) -> Path:
    """A package `mlx` whose extension does not load, as MLX's does on Linux without a backend."""
    (folder / "mlx").mkdir(parents=True)
    (folder / "mlx" / "__init__.py").touch()
    code = f"import sys\nsys.platform = 'linux'\nraise ImportError({message!r})\n"
    (folder / "mlx" / "core.py").write_text(code)
    return folder


def python(*arguments: str, path: Iterable[Path] = ()) -> subprocess.CompletedProcess[str]:
    """An interpreter that has the standard library, our sources and `path`, and nothing else."""
    command = [sys.executable, "-S", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, SOURCES]))}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_without_a_backend_it_is_said_which_extra_to_take(tmp_path: Path) -> None:
    """Without MLX, which the core does not bring on Linux, and with its wheel alone.

    The command says so on one line, although its own code was not reached.
    """
    without_mlx = python(
        "-c", "import sys; sys.platform = 'linux'; import specdec_mlx; specdec_mlx.generate"
    )
    pretend_to_install(tmp_path, mlx="0.32.4")
    stub = linux_where_mlx_raises(tmp_path, NO_LIBRARY)
    for done in (
        without_mlx,
        python("-c", "import specdec_mlx; specdec_mlx.generate", path=[stub]),
    ):
        assert done.stderr.splitlines()[-1] == f"specdec_mlx.errors.MissingBackendError: {CHOOSE}"
    guarded = (
        "try:\n from specdec_mlx import generate\nexcept ImportError as error:\n print(error.name)"
    )
    assert python("-c", guarded, path=[stub]).stdout == "mlx.core\n"
    script = tmp_path / "specdec-mlx"
    script.write_text("from specdec_mlx.cli.commands import main\nraise SystemExit(main())\n")
    for command in (["-m", "specdec_mlx"], [str(script)]):
        done = python(*command, "doctor", path=[stub])
        said = (done.returncode, done.stdout, done.stderr)
        assert said == (2, "", f"specdec-mlx: {CHOOSE}\n")


def test_a_backend_that_does_not_load_is_named_with_the_command_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone with another that was uninstalled, of another version, or without its driver."""
    pretend_to_install(tmp_path, mlx="0.32.4", mlx_cpu="0.32.2")
    stub = linux_where_mlx_raises(tmp_path, "undefined symbol: fast")
    done = python("-c", "import specdec_mlx; specdec_mlx.generate", path=[stub])
    assert done.stderr.splitlines()[-1].endswith(
        "MLX does not load (undefined symbol: fast) from mlx 0.32.4, mlx-cpu 0.32.2. Mend it: "
        'pip uninstall -y mlx mlx-cpu && pip install "specdec-mlx[cpu]".'
    )
    pretend_to_install(tmp_path, mlx_cuda_13="0.32.4")
    done = python("-c", "import specdec_mlx; specdec_mlx.generate", path=[stub])
    assert done.stderr.splitlines()[-1].endswith(
        'pip uninstall -y mlx mlx-cpu mlx-cuda-13 && pip install "specdec-mlx[cuda13]". '
        "CUDA also needs NVIDIA's driver."
    )
    monkeypatch.setattr(sys, "platform", "darwin")  # a Mac's backend comes with MLX
    problem = backends.without_mlx(ImportError("No module named 'mlx'"))
    assert isinstance(problem, MissingBackendError)
    assert "No module named 'mlx'" in str(problem)
    assert str(problem).endswith("pip install --force-reinstall mlx")


CPU = {"mlx-cpu": "0.32.4"}
RIGHT = doctor.Installation("cpu", "Some Processor", "OpenBLAS", CPU, "0.32.4", "0.32.2")
CUDA = replace(RIGHT, runs_on="cuda", blas=None, backends={"mlx-cuda-13": "0.32.4"})
MAC = replace(RIGHT, runs_on="metal", blas=None, backends={})
SLOW = replace(RIGHT, blas=REFERENCE_BLAS)

FOUND: list[tuple[doctor.Installation, int, tuple[str, ...]]] = [
    *((right, 0, ()) for right in (RIGHT, CUDA, MAC)),
    (replace(SLOW, openblas={"A": "/c/l.so"}), 0, ("export A=/c/l.so OPENBLAS_NUM_THREADS=1",)),
    (
        replace(RIGHT, backends=CPU | CUDA.backends),
        1,
        ("mlx-cpu and mlx-cuda-13 are both installed", 'pip install "specdec-mlx[cuda13]"'),
    ),
    (
        replace(RIGHT, backends={"mlx-cpu": "0.32.3"}),
        1,
        ("mlx-cpu 0.32.3", "mlx's version, 0.32.4", "pip uninstall -y mlx mlx-cpu && "),
    ),
    (replace(CUDA, runs_on="cpu"), 1, ("finds no GPU", "nvidia-smi")),
    (SLOW, 1, ("reference BLAS", 'pip install "specdec-mlx[cpu]"')),
    (replace(RIGHT, refusal="mlx-lm 0.33.0 is new."), 1, ("0.33.0 is new",)),
]
"""What is installed, the exit status, and what is said of it."""


@in_one_test(("found", "status", "fragments"), FOUND)
def test_the_doctor_prints_what_a_bug_report_needs_and_names_one_problem(
    found: doctor.Installation,
    status: int,
    fragments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line for each fact; a problem comes with the command that mends it, and exit status 1."""
    monkeypatch.setattr(doctor, "inspect_installation", lambda: found)
    assert main(["doctor"]) == status
    facts, _, advice = capsys.readouterr().out.strip().partition("\n\n")
    assert advice.count("warning: ") == status
    positions = [advice.index(fragment) for fragment in fragments]
    assert positions == sorted(positions)
    lines = dict(line.split(maxsplit=1) for line in facts.splitlines())
    if found.blas is not None:
        blas, _, exactness = lines.pop("BLAS").partition(" (")
        assert blas == found.blas
        assert ("bit-equal" in exactness) == (blas == "reference BLAS")
    backends = ", ".join(map(" ".join, found.backends.items()))
    assert lines.pop("system").endswith(f"{os.cpu_count()} cores")
    assert lines == {
        "specdec-mlx": specdec_mlx.__version__,
        "backend": f"{found.runs_on} ({backends})" if backends else found.runs_on,
        "device": found.device,
        "mlx": found.mlx,
        "mlx-lm": found.mlx_lm,
        "Python": ".".join(map(str, sys.version_info[:3])),
    }


def test_the_doctor_looks_at_this_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two backends are seen by their metadata, another mlx-lm by its version."""
    found = doctor.inspect_installation()
    assert (found.mlx_lm, found.refusal) == (mlx_lm.__version__, None)
    assert (found.runs_on == "cpu") == (mx.default_device() == mx.cpu)
    assert len(found.backends) <= 1
    pretend_to_install(tmp_path, mlx_cpu="0.1", mlx_cuda_12="0.2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mlx_lm, "__version__", "0.31.0")
    found = doctor.inspect_installation()
    assert found.backends == {"mlx-cpu": "0.1", "mlx-cuda-12": "0.2"}
    assert "0.31.0" in (found.refusal or "")


LIBRARIES = {
    "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so": "OpenBLAS",
    "/somewhere with spaces/libopenblas.so.0": "OpenBLAS",
    "/opt/intel/libmkl_rt.so.2": "MKL",
    "/usr/lib/libblis.so.4": "BLIS",
    "/venv/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0": REFERENCE_BLAS,
    "/venv/site-packages/numpy.libs/libopenblas64_p-r0-5007b62f.3.23.so": REFERENCE_BLAS,
    "/venv/site-packages/scipy.libs/libopenblasp-r0-39a31c03.2.18.so": REFERENCE_BLAS,
    "/home/me/libopenblas/code.so": REFERENCE_BLAS,
}


@in_one_test("file", LIBRARIES)
def test_the_matrix_library_is_read_off_what_is_loaded(file: str) -> None:
    """By the library's own name; the copies that NumPy and SciPy bring do not serve MLX."""
    line = "7f0c1a400000-7f0c1a421000 r--p 00000000 fe:01 131085  {}\n"
    stack = "7ffd7a5e6000-7ffd7a607000 rw-p 0 00:00 0 [stack]\n"
    assert (
        blas_in(f"{line.format('/usr/lib/libc.so.6')}{stack}{line.format(file)}")
        == (LIBRARIES[file])
    )


# OpenBLAS for MLX on Linux: the wheel, what it needs, and the second start ------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="an ELF library is loaded")
def test_the_wheels_library_multiplies_for_mlx(tmp_path: Path) -> None:
    """In a process with these variables MLX's CPU backend has OpenBLAS in place of its own."""
    code = "import mlx.core as mx; from specdec_mlx.cli.blas import blas_name\n"
    code += "x = mx.ones((4, 4)); print(blas_name(), (x @ x).sum().item())"
    (variables,) = filter(None, [blas.find_openblas()])
    environment = {**os.environ, "SPECDEC_MLX_CACHE": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout, done.stderr) == (b"OpenBLAS 64.0\n", b"")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel and MLX's CPU backend, and an empty cache."""
    for name in (blas.LIBRARY, "mlx_cpu.libs/libgfortran-f7.so.5.0.0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    wheel = SimpleNamespace(locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(blas, "distribution", lambda name: wheel)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_wheels_library_finds_mlxs_fortran_by_its_plain_name(installed: Path) -> None:
    """Through a link in the cache, which is mended where it leads elsewhere."""
    fortran = installed / "mlx_cpu.libs" / "libgfortran-f7.so.5.0.0"
    link = installed / "cache" / "blas" / fortran.name / "libgfortran.so.5"
    expected = {
        "LD_PRELOAD": str(installed / blas.LIBRARY),
        "LD_LIBRARY_PATH": f"{link.parent}:{fortran.parent}",
    }
    for _ in range(2):
        assert blas.find_openblas() == expected
        assert link.resolve() == fortran
        assert list(link.parent.iterdir()) == [link]
        link.unlink()
        link.symlink_to("of another environment, which is gone")


def test_without_the_wheel_nothing_is_preloaded(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is wrong with it, MLX or the cache is an error: the command works without."""

    def no_distribution(name: str) -> Any:
        raise PackageNotFoundError(name)

    (installed / "cache").write_text("a file where the folder should be")
    assert blas.find_openblas() == {}
    (installed / "cache").unlink()
    assert blas.find_openblas() != {}
    for file in ("mlx_cpu.libs/libgfortran-f7.so.5.0.0", blas.LIBRARY):
        (installed / file).rename(installed / "away")
        assert blas.find_openblas() == {}
        (installed / "away").rename(installed / file)
    monkeypatch.setattr(blas, "distribution", no_distribution)
    assert blas.find_openblas() == {}


OWN = {"LD_PRELOAD": "/site/libopenblas.so.0", "LD_LIBRARY_PATH": "/cache/gf:/site/mlx_cpu.libs"}


class Started(BaseException):
    """`os.execve` does not return."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict]]:
    """A `specdec-mlx demo --seconds 9` that wants OpenBLAS, and what it is replaced by."""
    seen: list[tuple[str, list[str], dict]] = []

    def execve(*call: Any) -> None:
        seen.append(call)
        raise Started

    monkeypatch.setattr(blas.os, "environ", {"LD_PRELOAD": "libtrace.so", "PATH": "/bin"})
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(blas.os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["/venv/bin/specdec-mlx", "demo", "--seconds", "9"])
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", *sys.argv])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas.mx, "default_device", lambda: blas.mx.cpu)
    monkeypatch.setattr(blas, "blas_name", lambda: blas.REFERENCE_BLAS)
    monkeypatch.setattr(blas, "find_openblas", lambda: OWN)
    return seen


def test_the_command_starts_again_with_the_library_preloaded(
    starts: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same Python, once; the user's own libraries and threads stay."""
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    ((program, arguments, environment),) = starts
    assert program == "/venv/bin/python"
    expected = ["-X", "dev", "/venv/bin/specdec-mlx", "demo", "--seconds", "9"]
    assert arguments == ["/venv/bin/python", *expected]
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert environment == {
        "LD_PRELOAD": "/site/libopenblas.so.0:libtrace.so",
        "LD_LIBRARY_PATH": OWN["LD_LIBRARY_PATH"],
        "OPENBLAS_NUM_THREADS": "4",
        "PATH": "/bin",
        blas.PRELOADED: "1",
    }
    assert capsys.readouterr().err.startswith("Preloading OpenBLAS")
    monkeypatch.setattr(blas.os, "environ", environment)
    assert blas.start_again_with_openblas("demo") == OWN
    assert blas.PRELOADED not in environment
    monkeypatch.setattr(blas.os, "environ", {blas.THREADS: "3"})
    with pytest.raises(Started):
        blas.start_again_with_openblas("demo")
    assert starts[1][2][blas.THREADS] == "3"


@in_one_test(
    ("module", "name", "value"),
    [
        (sys, "platform", "darwin"),
        (blas.mx, "default_device", lambda: blas.mx.gpu),
        (blas, "blas_name", lambda: "OpenBLAS"),
        (blas, "blas_name", lambda: "MKL"),
        (blas, "find_openblas", dict),
        (sys, "argv", ["/bin/pytest", "tests"]),
        (sys, "orig_argv", ["python", "/bin/pytest", "tests"]),
    ],
)
def test_nothing_starts_again_where_that_gains_nothing(
    module: Any, name: str, value: Any, starts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never in a process that is not the command itself."""
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        assert blas.start_again_with_openblas("demo") == {}
    assert starts == []

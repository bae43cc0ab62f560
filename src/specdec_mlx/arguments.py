"""Arguments: their checks and errors, NAME:key=value as typed, and the parser of flags."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import operator
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from math import inf, nan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args

from specdec_mlx.errors import MissingPackageError, UnknownNameError

T = TypeVar("T")


OWN_PACKAGE = "specdec-mlx"

DEFAULT_DRAFTER = "auto"  # the drafter of commands that are told none
MODEL_DRAFTER = "model"  # the name of a draft model, wherever it comes from
NO_DRAFTER = "none"  # the name of plain decoding
PROCESS = "process"  # a memory that ends with its process, where a file's name could stand
AUTO = "auto"  # the draft length that is chosen by what pays
OFF = "off"
DRAFT_VOCABS = f"'{AUTO}', '{OFF}', a number of tokens from 1, or a file of counts"
RULES = ("auto", "match", "coupled", "rejection", "block")
"""Names of the library's own rules."""
KERNELS = (AUTO, "split", "mlx-dspark", NO_DRAFTER)
"""Names of kernels for passes over several rows."""
DRAFTER_GROUP, RULE_GROUP = "specdec_mlx.drafters", "specdec_mlx.rules"
"""Groups of entry points by which packages give their drafters and rules a name."""


WORDS = {"true": True, "false": False, "none": None}


_INT = re.compile(r"[+-]?\d{1,18}", re.ASCII)


_FLOAT = re.compile(r"[+-]?(\d{1,18}\.?\d{0,18}|\.\d{1,18})(e[+-]?\d{1,3})?", re.ASCII | re.I)


FOREIGN = re.compile(r"--.*(spec|draft|lookup|assistant|ngram)")
"""Flags that other programs have for speculation."""


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of NAME:key=value,... Raises ValueError."""
    return name_in(spec), parse_options(spec.partition(":")[2])


def name_in(spec: str) -> str:
    return spec.partition(":")[0]


def parse_options(text: str) -> dict[str, Any]:
    """Options of `key=value,key=value`. Raises ValueError.

    Values are numbers, true, false or none, or else text with or without quotes. Nothing is
    evaluated.
    """
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"Option {part!r}: expected key=value.")
        options[key.strip().replace("-", "_")] = _value(value.strip())
    return options


def _value(text: str) -> int | float | bool | str | None:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text[1:-1] if _QUOTED.fullmatch(text) else text


def short_repr(value: object) -> str:
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        return name
    is_plain = isinstance(value, str) or hasattr(value, "tolist") or "\n" not in repr(value)
    return " ".join(reprlib.repr(value).split()) if is_plain else type(value).__name__


def argument_error(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name}={short_repr(value)}: expected {expected}.")


def require(owner: object, holds: bool, name: str, expected: str) -> None:
    """Raise ValueError with an attribute's name and value, unless the condition holds."""
    if not holds:
        got = f"{type(owner).__name__}({name}={short_repr(getattr(owner, name))})"
        raise ValueError(f"{got}: expected {expected}.")


def require_cap(owner: Any) -> None:
    """Raise ValueError unless an object's `num_draft` is a length or None."""
    some = "an int >= 1, or None for no cap; to draft nothing, leave the drafter out"
    holds = owner.num_draft is None or owner.num_draft >= 1
    require(owner, holds, "num_draft", some)


def check_int(name: str, value: Any, least: int | None = None, or_else: str = "") -> int:
    """An int of an argument, also of NumPy's type. Raises ValueError below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise argument_error(
            name, value, f"an int{'' if least is None else f' >= {least}'}{or_else}"
        )
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the most similar known name. "" if no name is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    # `difflib` misses a known name with a long ending.
    near = near or [one for one in known if len(one) > 3 and name.startswith(one)][:1]
    return f" Did you mean {near[0]}?" if near else ""


def unknown(what: str, name: str, known: Sequence[str], more: str = "") -> UnknownNameError:
    """The error for an unknown name. `more` is another next step."""
    near = did_you_mean(name, known)
    return UnknownNameError(f"Unknown {what} {name!r}. Known: {', '.join(known)}.{near}{more}")


def is_place(text: str) -> bool:
    """True for a text that may be the folder or Hugging Face repository of a model."""
    return "/" in text or Path(text).exists()


PLACES = " The folder or the repository (OWNER/NAME) of a model or a head drafts as well."


def check_names(
    names: Iterable[str], called: Callable[..., Any], *takers: Callable[..., Any]
) -> None:
    """Raise TypeError for a name that is no parameter of the called function or its callees."""
    known = {name for one in (called, *takers) for name in inspect.signature(one).parameters}
    for name in names:
        if name not in known:
            raise TypeError(
                f"{called.__name__}() got an unexpected keyword argument {name!r}."
                f"{did_you_mean(name, known)}"
            )


def refusal(unknown: Sequence[str], known: Iterable[str] = ()) -> str:
    """The error for unknown arguments and their values, with the flag that is probably meant."""
    # Only flags are compared. A value may look like anything.
    flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
    for flag in flags:
        # Another program's flag for speculation: name ours.
        if FOREIGN.match(flag):
            return (
                f"{flag} is not known here; speculation is set by --drafter NAME, --draft-model "
                "MODEL and --num-draft-tokens N"
            )
    near = "".join(did_you_mean(flag, known) for flag in flags)
    return f"unrecognized arguments: {' '.join(unknown)}{near and '.' + near}"


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of two lines and a `--help` of the common flags."""

    rare: frozenset[str] = frozenset()
    """Flags that only `--help-all` explains."""

    def add_help_all(self, rare: Iterable[str]) -> None:
        """Explain these flags, written without dashes, only in `--help-all`."""
        self.rare = frozenset(f"--{name}" for name in rare)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="explain all flags and exit")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(refusal(unknown, self._option_string_actions))
        return namespace

    def check(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except (ValueError, OSError) as error:
            self.error(str(error))

    def print_help(self, file: Any = None) -> None:
        for action in self._actions:
            if self.rare.intersection(action.option_strings):
                action.help = argparse.SUPPRESS
        super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # argparse names the function that could not read a value.
        if match := re.fullmatch(r"(.*)invalid (int|float|loads) value: (.*)", message, re.S):
            kind = {"int": "an int", "float": "a number", "loads": "JSON"}[match[2]]
            message = f"{match[1]}{match[3]}: expected {kind}."
        more = "--help-all" if self.rare else "--help"
        self.exit(2, f"{self.prog}: {message}\nAll flags: {self.prog} {more}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}.{near}")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit()


def parse_draft_length(text: str) -> int | str:
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise ValueError(f"{text!r}: expected an int >= 0, or {AUTO}")
    return int(text)


def parse_draft_vocab(text: str) -> int | str:
    if text.isdecimal() and int(text):
        return int(text)
    if text not in (AUTO, OFF) and not Path(text).expanduser().is_file():
        raise ValueError(f"{text!r}: expected {DRAFT_VOCABS}")
    return text


def registered_names(group: str, *ours: str) -> list[str]:
    return list(dict.fromkeys([*ours, *sorted(entry_points(group=group).names)]))


def known(what: str, names: Sequence[str], more: str = "") -> Callable[[str], str]:
    """The `type` of a flag that takes NAME or NAME:key=value,... with one of these names.

    more: `PLACES` for a flag that also takes the place of a model.
    """

    def parse(spec: str) -> None:
        if (name := name_in(spec)) not in names and not (more and is_place(spec)):
            raise unknown(what, name, names, more)

    return checked(parse)


def number(kind: type[int | float], least: float, most: float = inf) -> Callable[[str], Any]:
    bounds = f">= {least:g}" if most == inf else f"from {least:g} to {most:g}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = nan
        if not least <= value <= most:
            what = "an int" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}: expected {what} {bounds}.")
        return value

    return parse


def add_lighter_arguments(parser: Any) -> None:
    text = "Draft with its first layers only."
    parser.add_argument("--draft-layers", type=number(int, 1), metavar="N", help=text)
    text = "Tokens that its drafts choose from, chosen again as the text grows (default: auto)."
    vocab = argument(parse_draft_vocab)
    parser.add_argument("--draft-vocab", type=vocab, metavar=f"{AUTO}|{OFF}|N|FILE", help=text)


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {path.absolute()}.")
    return path


def new_file(text: Path | str) -> Path:
    """The path of a file to write. Raises ValueError now if that is impossible."""
    path = Path(text)
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}. Give another.") from error
    if is_new:
        path.unlink()
    return path


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as the `type` of a flag. argparse shows the message of its ValueError."""

    @functools.wraps(parse)
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    @functools.wraps(parse)
    def check(text: str) -> str:
        argument(parse)(text)
        return text

    return check


def installed(group: str, what: str, taken: Iterable[str] = ()) -> dict[str, EntryPoint]:
    """The entry points of a group by name, ours first and then by the names of their packages.

    Warns of packages whose name for an entry is in use or in `taken`, the library's own names.
    """
    owners = dict.fromkeys(taken, OWN_PACKAGE)
    known: dict[str, EntryPoint] = {}
    entries = [(package_of(entry), entry) for entry in entry_points(group=group)]
    for package, entry in sorted(entries, key=lambda one: (one[0] != OWN_PACKAGE, one[0])):
        # The first package by name wins, so that the order of installation has no effect.
        owner = owners.setdefault(entry.name, package)
        if owner == package:
            known.setdefault(entry.name, entry)
            continue
        warnings.warn(
            f"specdec_mlx: {what} {entry.name!r} of {package} is left out, since {owner} has one "
            f"of that name. Uninstall one of them, or give the {what} itself instead of its name.",
            stacklevel=2,
        )
    return known


def package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def load(entry: EntryPoint, what: str) -> Callable[..., Any]:
    try:
        kind: Callable[..., Any] = entry.load()
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            f"{what.capitalize()} {entry.name!r} of {package_of(entry)} cannot be loaded: {error}"
        ) from error
    return kind


def make_with(what: str, name: str, kind: Callable[..., T], options: dict[str, Any]) -> T:
    """`kind(**options)` with options that a user typed. `what` and `name` are for the error.

    Raises ValueError for an unknown option, and for a value of another type than the annotation.
    """
    hints = _annotations(kind)
    try:
        return kind(**{key: _fitted(key, value, hints.get(key)) for key, value in options.items()})
    except TypeError as error:
        near = "".join(did_you_mean(option, hints) for option in options if option not in hints)
        problem = f"{error}.{near}" if hints else f"{name} takes no options ({error})."
        raise ValueError(f"{what.capitalize()} {name!r}: {problem} {help_on(kind)}") from error


def help_on(kind: Callable[..., Any]) -> str:
    made_by = kind.func if isinstance(kind, functools.partial) else kind
    return f"See help({getattr(made_by, '__name__', made_by)})."


def _annotations(kind: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of arguments, as far as they can be evaluated."""
    try:
        parameters = inspect.signature(kind, eval_str=True).parameters.values()
    except Exception:  # annotations may name what only type checkers import
        return {}
    return {parameter.name: parameter.annotation for parameter in parameters}


def _fitted(option: str, value: Any, hint: Any) -> Any:
    """The value if it has the annotated type, with an int as a float. Raises TypeError."""
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    # Other annotations, such as a Path or a class, are left to the function itself.
    if not kinds <= {int, float, bool, str, NoneType} or type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    raise TypeError(f"{option} is {value!r}, expected {inspect.formatannotation(hint)}")

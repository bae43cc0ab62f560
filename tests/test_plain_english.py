"""Pages, docstrings of public names and error messages are written in plain English."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import specdec_mlx
from selection import in_one_test

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "specdec_mlx"
GENERATED = ("commands.md", "mutations.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED]

MOST_WORDS = 30
MOST_PROSE = 20_000

TICS = {
    r"\bof a further one\b|\bones\b|\bthe one (?:that|of|which)\b": "use the noun",
    r"\bthose (?:of|that|which|where|in|before|after|above|below|with)\b": "use the noun",
    r"\b(?:as|than|and|is|are|not|like) (?:that|those) of\b": "use the noun",
    r"\bwhat (?:came|comes|stands|drafts)\b": "use a noun",
    r"\bwhat (?:is|was|were) (?!expected|needed)(?:\w+ed|read|kept|drawn|written)\b": "use a noun",
    r"\ball (?:else|but)\b|\bbut for\b": "write 'everything else' or 'except'",
    r"\bas of (?=`|\[|mlx)": "write 'as in' or 'like'",
    r"\b(?:it|them) alone\b|\w+s alone\b(?! in)": "write 'only'",
    r"(?<!times )\bas (?:many|much|few)\b(?![^.,;:]* as\b)": "say as many as what",
    r"\bof (?:its|their|your|our) own\b(?! \w)": "write 'its own X' or 'your X'",
    r"\b(?:is|are|was|were) asked for\b|\basked for or not\b": "name the option or the call",
    r"\bheld to\b|\bholds? \w+ to\b": "write 'checked against'",
    r"\bhas had its say\b|\bhas a say\b": "write 'influences'",
    r"\bsays? so\b|\bsays? which\b(?= *[,.;])": "name the attribute or the flag",
    r"\b(?:knows?|imports?|keeps?|keep) nothing of\b": "write 'does not'",
    r"\bstands? (?:in|on|at|beside|alone|for itself|apart)\b": "write 'is in'",
    r"\bbesides\b(?! \w)": "write 'also'",
    r"\bits? (?:is )?what (?:makes|it)\b": "use a noun",
    r"\bor not\b(?=[,.;:])": "end the sentence earlier",
    r", (?:never|also|too|once|twice|mostly|whole|anew)(?: \w+){0,4}[.]": "no afterthought",
    r"\bwhether or no\b|\bthereof\b|\bherein\b|\bof such\b|\bsuch (?!as\b|a\b|an\b)\w+": "name it",
    r"\bthe same[.;:]": "the same what?",
    r"\btaken (?:over|back)\b|\bgiven back\b": "write 'copied', 'undone' or 'returned'",
    r"\bin truth\b|\bby the same door\b|\bon account\b": "say it plainly",
}
"""Phrases that send a reader back, with the advice that a finding prints."""


class Finding(NamedTuple):
    file: str
    rule: str
    sentence: str


CODE = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
GENERATED_BLOCK = re.compile(r"<!-- (gains|known|map)\b.*?<!-- end of (?:the )?\1 -->", re.S)
ADDRESS = re.compile(r"^\[[^]]+\]: http.*$", re.M)
LINK = re.compile(r"!?\[([^]\[]*)\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^]]*\])")
END = re.compile(
    r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bvs)[.!?](?=[)\"']*\s+(?:[\"'(]*[A-Z`]|\"|mlx))"
)


def sentences_of_page(text: str) -> Iterator[str]:
    """The sentences of a page's paragraphs and items. Code, tables and headings have none."""
    for pattern in (CODE, GENERATED_BLOCK, COMMENT, ADDRESS):
        text = pattern.sub("\n\n", text)
    lines = (
        line
        for line in text.splitlines()
        if not line.startswith(("#", "|", ":::", "    options", "[!", "<"))
    )
    paragraphs = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", "\n".join(lines))
    for paragraph in paragraphs:
        yield from sentences(re.sub(r"^ *(?:[-*]|\d+\.) ", "", paragraph))


def sentences_of_docstring(text: str) -> Iterator[str]:
    """The sentences of a docstring; each argument or attribute begins a sentence."""
    text = re.sub(r"^(?:Args|Attributes|Returns|Raises|Yields|Example):$", "", text, flags=re.M)
    text = CODE.sub("\n\n", re.sub(r"^ +\*{0,2}\w+: ", "\n", text, flags=re.M))
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        if not paragraph.lstrip().startswith((">>>", "|")):
            yield from sentences(paragraph)


def sentences(paragraph: str) -> Iterator[str]:
    """Split a paragraph, with code and formulas as single words."""
    text = LINK.sub(r"\1", " ".join(paragraph.split())).replace("*", "")
    text = re.sub(r"`[^`]*`|\$[^$]+\$", "`x`", text)
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        if sentence := text[start:end].strip():
            yield sentence
        start = end


def faults(sentence: str) -> Iterator[str]:
    """What a sentence does against the rules."""
    words = len(re.findall(r"[\w`][^\s]*", sentence))
    if words > MOST_WORDS:
        yield f"{words} words; at most {MOST_WORDS}"
    clauses = re.sub(r"\([^)]*\)|\{.*\}|^(?:argument )?\S+: |; got\b", "", sentence)
    if len(re.findall(r"[:;]\s", clauses)) > 1:
        yield "three clauses hung on colons or semicolons"
    if re.match(r"(?:What|Who|Where)\b.*[.:;]$", sentence):
        yield f"begins with {sentence.split()[0]} and asks nothing"
    for pattern, advice in TICS.items():
        if match := re.search(pattern, sentence):
            yield f"{match[0]!r}: {advice}"


def findings_in_pages() -> Iterator[Finding]:
    for page in PAGES:
        for sentence in sentences_of_page(page.read_text(encoding="utf-8")):
            for rule in faults(sentence):
                yield Finding(str(page.relative_to(ROOT)), rule, sentence)


def findings_in_docstrings() -> Iterator[Finding]:
    for name in specdec_mlx.__all__:
        value = getattr(specdec_mlx, name)
        members = vars(value) if inspect.isclass(value) else {}
        public = [member for key, member in members.items() if not key.startswith("_")]
        path = inspect.getfile(inspect.unwrap(value))
        file = "src" + path[path.rindex("/specdec_mlx/") :]
        for member in [value, *public]:
            if inspect.isclass(member) or callable(member) or isinstance(member, property):
                for sentence in sentences_of_docstring(inspect.getdoc(member) or ""):
                    for rule in faults(sentence):
                        yield Finding(file, rule, sentence)


def message_of(node: ast.expr) -> str:
    """The text of a message. Each value that is filled in is one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(message_of(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return message_of(left) + message_of(right)
    return "`x`"


def findings_in_messages() -> Iterator[Finding]:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "raise " not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                messages = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
                for message in messages:
                    for sentence in sentences(message_of(message)):
                        for rule in faults(sentence):
                            yield Finding(str(path.relative_to(ROOT)), rule, sentence)


def findings() -> list[Finding]:
    return [*findings_in_pages(), *findings_in_docstrings(), *findings_in_messages()]


def test_pages_docstrings_and_errors_are_in_plain_english() -> None:
    """Short sentences, few clauses, and none of the phrases that send a reader back."""
    wrong = findings()
    lines = "\n".join(f"{file}: {rule}\n    {sentence}" for file, rule, sentence in wrong)
    assert not wrong, f"{len(wrong)} sentences to rewrite:\n{lines}"


def test_the_pages_stay_short() -> None:
    """The prose of all pages has an upper limit. Code and tables are not counted."""
    pages = [page for page in PAGES if page.parent.name == "docs"]
    found = (sentences_of_page(page.read_text(encoding="utf-8")) for page in pages)
    assert sum(len(sentence.split()) for page in found for sentence in page) <= MOST_PROSE


VAGUE = re.compile(
    "_*(asked|Asked|ends|expect|found|given|held|kept|Kept|Level|Loaded|named|own|said|Said|several"
    "|shown|Taps|taught|told|Unread|whole|written|Written|wrong)_*"
)
"""Names that do not say what they hold. A function is a verb phrase, and a class is a noun."""

NOT_YET_CLEAN: tuple[str, ...] = ()
"""Rooms that still have such names."""


def vague_names(code: str) -> Iterator[tuple[int, str]]:
    """Line and name of each function, class, argument, variable and attribute with a vague name."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if VAGUE.fullmatch(name):
            yield node.lineno, name


def test_names_say_what_they_hold() -> None:
    """No vague name in the rooms that are clean, and at least one in each of the others."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0]
        for line, name in vague_names(path.read_text(encoding="utf-8")):
            found.setdefault(room, []).append(f"{path.relative_to(ROOT)}:{line}: {name}")
    wrong = {room: names for room, names in found.items() if room not in NOT_YET_CLEAN}
    assert not wrong, "\n".join(name for names in wrong.values() for name in names)
    assert [room for room in NOT_YET_CLEAN if room not in found] == []


@in_one_test(
    ("code", "name"),
    (
        ("def told(): ...", "told"),
        ("class Kept: ...", "Kept"),
        ("def f(own): ...", "own"),
        ("for found in []: ...", "found"),
        ("x = lambda given: 0", "given"),
        ("self._held = 1", "_held"),
        ("with open(x) as (a, ends): ...", "ends"),
        ("x.kept, y = whole(1), 'told'", "kept"),
        ("num_kept = ask(told.kept)", None),
    ),
)
def test_the_lint_finds_vague_names(code: str, name: str | None) -> None:
    """Names are found where they are given, and not where they are only used."""
    assert [found for _, found in vague_names(code)] == ([name] if name else [])


EXAMPLES = (
    ("The end: the first `length` tokens are all that the caller has.", None),
    ("Keep the whole draft unless it would lose even if every sequence had one this good.", None),
    ("What costs time to ask drafts on account.", "begins with What"),
    ("Where a tree does not fork each is its chain rule.", "begins with Where"),
    ("What is a draft?", None),
    ("A draft of its own, for trees alone; a chain: none; a tree: two.", "three clauses"),
    ("The chances are those of the target.", "'those of'"),
    ("All else is as of `generate`.", "'as of '"),
    ("It costs time, never text.", "', never text.'"),
    ("A word " * 15 + "ends.", "31 words"),
)


@in_one_test(("sentence", "rule"), EXAMPLES)
def test_the_lint_finds_what_it_names(sentence: str, rule: str | None) -> None:
    """Each rule finds a sentence that breaks it, and plain sentences pass."""
    broken = list(faults(sentence))
    assert any(fault.startswith(rule) for fault in broken) if rule else broken == []


if __name__ == "__main__":  # with names of files: their findings; without: how many each has
    import collections
    import sys

    chosen = [found for found in findings() if found.file in sys.argv[1:] or not sys.argv[1:]]
    for found in chosen if sys.argv[1:] else ():
        print(f"- {found.rule}\n    {found.sentence}")
    for name, count in collections.Counter(found.file for found in chosen).most_common():
        print(count, name)

"""The fenced blocks of the documentation, each with a name, and the commands of those that are for a shell.

The pages are README.md and what is below docs/; the Chinese ones have the blocks of their originals, which a test
compares. A block is named for its page and the heading above it: `quickstart.md#on-a-gpu`, and
`quickstart.md#on-a-gpu-2` for the second one there.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELLS = ("bash", "sh")
CONSOLE = "console"
"""Commands after `$ `, and what they print."""
CODE = ("python", "yaml", "json", "toml", *SHELLS, CONSOLE)
TEXT = "text"
"""Pictures, and what programs print."""
OPERATORS = frozenset(";&|()<>")
ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    name: str
    kind: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each simple command, those in `$(…)` included; redirections and assignments are left out."""
        script = self.text if self.kind != CONSOLE else "\n".join(typed for typed, _ in self.typed())
        return [words for line in _logical_lines(script) for words in _commands_of(line)]

    def typed(self) -> Iterator[tuple[str, str]]:
        """Of a console, each command with what it prints."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            end = next(number for number, line in enumerate(lines) if not line.endswith("\\\n")) + 1
            yield "".join(lines[:end]), "".join(lines[end:])


def snippets() -> list[Snippet]:
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [each for page in pages for each in snippets_of(page.name, page.read_text(encoding="utf-8"))]


def snippets_of(page: str, text: str) -> Iterator[Snippet]:
    seen: Counter[str] = Counter()
    fences = list(FENCE.finditer(text))
    for fence in fences:
        above = FENCE.sub("", text[: fence.start()])
        heading = (re.findall(r"^#+ (.*)$", above, re.MULTILINE) or [""])[-1]
        name = f"{page}#{anchor(heading)}"
        seen[name] += 1
        yield Snippet(name if seen[name] == 1 else f"{name}-{seen[name]}", fence[1], fence[2])


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, punctuation dropped, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _logical_lines(script: str) -> Iterator[str]:
    """Lines that go on after a backslash or within quotes are one; comments are left out."""
    begun = ""
    for line in script.replace("\\\n", " ").splitlines():
        begun += line
        try:
            shlex.split(begun, comments=True)
        except ValueError:  # a quote is still open
            begun += "\n"
            continue
        yield begun
        begun = ""
    assert not begun, f"a quote is not closed in {begun!r}"


def _commands_of(line: str) -> Iterator[list[str]]:
    line, inner = _without_substitutions(line)
    for each in inner:
        yield from _commands_of(each)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(OPERATORS))
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if word and OPERATORS.issuperset(word):
            redirected = word[0] in "<>"
            if not redirected:
                if words := words[_assignments(words) :]:
                    yield words
                words = []
        elif redirected:
            redirected = False
        else:
            words.append(word)


def _assignments(words: list[str]) -> int:
    return next((number for number, word in enumerate(words) if not ASSIGNMENT.fullmatch(word)), len(words))


def _without_substitutions(line: str) -> tuple[str, list[str]]:
    """The line with a word in place of each `$(…)`, and what was inside."""
    inner: list[str] = []
    while (start := line.find("$(")) >= 0:
        end, depth = start + 2, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        inner.append(line[start + 2 : end - 1])
        line = f"{line[:start]}substituted{line[end:]}"
    return line, inner

"""What the guides of the site print works: commands parse, settings load, agents play, translations agree."""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guide_stage import TASK, guide_stage

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.messages import Episode
from areal.cli.parsers import verb_parser
from areal.cli.verbs import VERBS
from areal.config.reference import settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "agents.md",
    "checkpoints.md",
    "coming-from.md",
    "concepts.md",
    "proxy.md",
    "quickstart.md",
    "security.md",
    "settings.md",
    "tracing.md",
    "troubleshooting.md",
]
TRANSLATED = sorted(path.name for path in (DOCS / "zh").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[Any]:
    """Of all pages, each with the name of its page and its number there."""
    return [
        pytest.param(text, id=f"{page}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(FENCE.findall((DOCS / page).read_text(encoding="utf-8")))
        if kind == language
    ]


def commands(script: str) -> Iterator[list[str]]:
    """The words of each, which may go on over lines after a backslash or within quotes."""
    begun = ""
    for line in script.replace("\\\n", " ").splitlines():
        begun += line
        if begun.count("'") % 2 == 0:
            if words := shlex.split(begun, comments=True):
                yield words
            begun = ""
    assert not begun, "a quote is not closed"


@pytest.mark.parametrize("script", blocks("bash"))
def test_printed_commands_are_understood(script: str) -> None:
    for program, *words in commands(script):
        if program == "areal":
            parsed = verb_parser(words[0], VERBS[words[0]]).parse_words(words[1:])
            demo = ["--config", str(ROOT / "areal/cli/demo.yaml")] if words[0] == "train" else []
            load_expr_config([*demo, *getattr(parsed, "overrides", [])], GRPOConfig)
        elif program == "pip" or (program, words[0]) == ("uv", "pip"):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = re.fullmatch(
                r"(?:pip )?install (?:--torch-backend=cpu )?areal-agents\[([\w,-]+)\]", " ".join(words)
            )
            assert named is not None
            assert set(named[1].split(",")) <= set(extras)
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif program != "curl":  # these are sent below
            assert program in {"python3", ".", "export", "uv"}, f"nothing here checks {program}"


@pytest.mark.parametrize("printed", blocks("yaml"))
def test_printed_settings_load(printed: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(printed, encoding="utf-8")
    load_expr_config(["--config", str(file)], GRPOConfig)


@pytest.mark.parametrize("source", blocks("python"))
async def test_printed_agents_earn_the_reward_of_a_right_answer(source: str) -> None:
    space: dict[str, Any] = {"__name__": "printed"}
    exec(source, space)
    (agent,) = (each for each in space.values() if isinstance(each, type) and each.__module__ == "printed")
    for said, reward in (("12", 1.0), ("13", 0.0)):
        async with guide_stage(lambda prompt, said=said: said) as stage:
            episode = await stage.play(agent, TASK)
            assert isinstance(episode, Episode), episode
            assert episode.reward == reward


@pytest.mark.parametrize("script", [each for each in blocks("bash") if "curl " in each.values[0]])
async def test_printed_requests_are_answered(script: str) -> None:
    ((_, *words),) = commands(script)
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    asked = parser.parse_args(words)
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'
    async with guide_stage(lambda prompt: called if "tool_choice" in (asked.d or "") else "12") as stage:
        key = stage.proxy.open_session().api_key
        answer = await stage.proxy.http_client.request(
            "POST" if asked.d else "GET",
            asked.url.replace("http://127.0.0.1:8000", stage.proxy.origin),
            headers=[each.replace("$KEY", key).split(": ") for each in asked.H],
            content=asked.d,
        )
        assert answer.status_code == 200, answer.text


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    section = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("\n## By message\n")[2]
    explained = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(explained) > 20
    known = [text for path in (ROOT / "areal").rglob("*.py") for text in texts(ast.parse(path.read_bytes()))]
    assert [each for each in explained if not any(pattern(each).search(text) for text in known)] == []


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module; what an f-string fills in is `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def pattern(message: str) -> re.Pattern[str]:
    """`…` on the page stands for anything."""
    return re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)


def test_names_that_others_names_are_translated_to_are_settings() -> None:
    known = {each.name for each in settings(GRPOConfig)}
    rows = re.findall(r"^\| .* \| (.*) \|$", (DOCS / "coming-from.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)[:`]", row)}
    assert len(named) > 30
    assert sorted(name for name in named if not name.startswith("areal.") and name not in known) == []


@pytest.mark.parametrize("page", TRANSLATED)
def test_translation_has_the_headings_and_snippets_of_its_original(page: str) -> None:
    english, chinese = ((path / page).read_text(encoding="utf-8") for path in (DOCS, DOCS / "zh"))
    assert FENCE.findall(chinese) == FENCE.findall(english)
    levels = [
        [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]
        for text in (english, chinese)
    ]
    assert levels[0] == levels[1]
    assert len(re.findall(r"^\| ", chinese, re.MULTILINE)) == len(re.findall(r"^\| ", english, re.MULTILINE))

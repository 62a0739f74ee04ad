"""The files that `areal new` writes, with `$name` where a name goes. What they say runs as it is."""

# MERGED-DOC
# A name added to a package's `__init__.py`: its import, its place in `__all__`, and nothing else moved.
#
# Text is inserted, never written anew, so comments and order stay; the result is parsed before it is handed over. A
# package that loads its names on first use (a `_HOMES` table, and imports under TYPE_CHECKING) stays like that.
# Where the files of a new workflow or agent go. Decides everything before a file is touched, and refuses bad names.
# `areal new workflow NAME` and `areal new agent NAME`: a first version that trains, its export, and its test.

import argparse
import ast
import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from areal.api.errors import ConfigError

WORKFLOW = Template('''\
"""$class_name: one question, one answer, one reward."""

import uuid
from collections.abc import Callable
from typing import Any

import torch
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow


class $class_name(RolloutWorkflow):
    """Answers `data["messages"]`; the reward is `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Callable[..., float]) -> None:
        """Made once per worker: whatever is slow to set up belongs here."""
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.reward = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """One episode; None rejects it. It shares an event loop with all others, so everything slow is awaited."""
        prompt = self.tokenizer.apply_chat_template(data["messages"], tokenize=False, add_generation_prompt=True)
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        response = await engine.agenerate(ModelRequest(uuid.uuid4().hex, prompt_ids, self.gconfig, self.tokenizer))
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward(prompt, completion, response.input_tokens, response.output_tokens, **data)
        return _tensors(response, reward)


def _tensors(response: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
    """Batch first, [1, length]; `concat_padded_tensors` of areal.utils.data joins several of these."""
    asked, sampled = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, asked + sampled, dtype=torch.bool),
        "loss_mask": torch.tensor([[False] * asked + [True] * sampled]),
        "logprobs": torch.tensor([[0.0] * asked + response.output_logprobs]),
        "versions": torch.tensor([[-1] * asked + response.output_versions]),
        "rewards": torch.tensor([float(reward)]),
    }
''')

WORKFLOW_TEST = Template('''\
"""$class_name against an engine without a model, which says what the test wants."""

from typing import Any

import pytest
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
${blank_elsewhere}from $module import $class_name

TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
TOKENIZER = make_tokenizer(["What is 2 + 2?"], vocab_size=300, max_positions=512)


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(completion == data["answer"])


@pytest.mark.asyncio
@pytest.mark.parametrize(("said", "worth"), [("4", 1.0), ("5", 0.0)])
async def test_answer_is_rewarded_and_its_tokens_are_trained(said: str, worth: float) -> None:
    sampled = [*TOKENIZER.encode(said), TOKENIZER.eos_token_id]
    engine = FakeEngine(vocab_size=len(TOKENIZER), script=lambda prompt: sampled, tokenizer=TOKENIZER)
    workflow = $class_name(GenerationHyperparameters(max_new_tokens=16), TOKENIZER, reward)

    episode = await workflow.arun_episode(engine, TASK)

    assert episode is not None
    assert episode["rewards"].tolist() == [worth]
    assert episode["input_ids"][episode["loss_mask"]].tolist() == sampled
''')

AGENT = Template('''\
"""$class_name: an agent on the OpenAI SDK."""

from typing import Any

from openai import AsyncOpenAI


class $class_name:
    """Asks once; 1.0 if the answer is right, else 0.0."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """One episode. It shares an event loop with all others, so everything slow is awaited."""
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        response = await client.chat.completions.create(model="default", messages=data["messages"])
        # A number rewards the last answer; {response.id: number, ...} rewards each by itself.
        return float((response.choices[0].message.content or "").strip() == data["answer"])
''')

AGENT_TEST = Template('''\
"""$class_name against a model that says what the test wants, through the proxy that it meets in training."""

from typing import Any

import pytest
${blank_in_checkout}from areal.api.cli_args import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy
${blank_elsewhere}from $module import $class_name

TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
TOKENIZER = make_tokenizer(["What is 2 + 2?"], vocab_size=300, max_positions=512)


@pytest.mark.asyncio
@pytest.mark.parametrize(("said", "worth"), [("4", 1.0), ("5", 0.0)])
async def test_answer_is_rewarded(said: str, worth: float) -> None:
    sampled = [*TOKENIZER.encode(said), TOKENIZER.eos_token_id]
    engine = FakeEngine(vocab_size=len(TOKENIZER), script=lambda prompt: sampled, tokenizer=TOKENIZER)
    proxy = Proxy(engine, TOKENIZER, gconfig=GenerationHyperparameters(max_new_tokens=16), max_positions=512)
    await proxy.start()
    try:
        session = proxy.open_session()
        keys = {"base_url": session.base_url, "api_key": session.api_key, "http_client": proxy.http_client}

        reward = await $class_name().run(TASK, **keys)

        assert reward == worth
        assert [completion.output_ids.tolist() for completion in session.tree.completions] == [sampled]
    finally:
        await proxy.aclose()
''')


LAZY_TABLE = "_HOMES"
EXPORTS = "__all__"
LINE_LENGTH = 120
"""A literal on one line that would grow longer gets a line per element."""

Literal = ast.List | ast.Tuple | ast.Dict


def with_name(text: str, module: str, name: str, where: str) -> str:
    """The text of `__init__.py` with `name` imported from `module` and exported; the same text if it is already.

    `where` is the file's name for errors.
    """
    tree = _parsed(text, where)
    is_imported = any(
        node.module == module and name in [each.name for each in node.names] for node in _import_nodes(tree)
    )
    if not is_imported:
        text = _with_import(text, tree, module, name)
    text = _with_element(text, LAZY_TABLE, name, f'"{name}": "{module}"')
    text = _with_element(_with_exports(text), EXPORTS, name, f'"{name}"')
    _parsed(text, where)
    return text


def _with_import(text: str, tree: ast.Module, module: str, name: str) -> str:
    """After the last import that sorts before it, among those of its package if there are any."""
    line = f"from {module} import {name}"
    lines = text.splitlines()
    nodes = _import_nodes(tree)
    siblings = [node for node in nodes if (node.module or "").startswith(module.split(".")[0])] or nodes
    if not siblings:
        at = _after_docstring(tree)
        return "\n".join([*lines[:at], *([""] if at else []), line, *lines[at:]]) + "\n"
    before = [node for node in siblings if (node.module or "") < module]
    neighbour = before[-1] if before else siblings[0]
    at = neighbour.end_lineno or 0 if before else neighbour.lineno - 1
    return "\n".join([*lines[:at], " " * neighbour.col_offset + line, *lines[at:]]) + "\n"


def _with_exports(text: str) -> str:
    """With an `__all__`, if there was none of what is imported already."""
    tree = ast.parse(text)
    if _literal(tree, EXPORTS) is not None:
        return text
    names = sorted((alias.asname or alias.name for node in _import_nodes(tree) for alias in node.names), key=_order)
    listed = ", ".join(f'"{name}"' for name in names if not name.startswith("_"))
    return f"{text.rstrip()}\n\n{EXPORTS} = [{listed}]\n"


def _with_element(text: str, variable: str, name: str, item: str) -> str:
    """`item` in a list or dict literal, before the first element that sorts after `name`; unchanged if it is there."""
    literal = _literal(ast.parse(text), variable)
    if literal is None or name in (names := [_text(key) for key in _keys(literal)]):
        return text
    line = text.splitlines()[literal.lineno - 1]
    is_spread = literal.lineno != literal.end_lineno
    if names and not is_spread and len(line) + len(item) + 2 > LINE_LENGTH:
        return _with_element(_spread(text, literal), variable, name, item)
    if not names:
        return _spliced(text, literal.lineno, literal.col_offset + 1, item)
    keys = _keys(literal)
    gap = f",\n{' ' * keys[0].col_offset}" if is_spread else ", "
    later = [key for key in keys if _order(_text(key)) > _order(name)]
    if later:
        return _spliced(text, later[0].lineno, later[0].col_offset, item + gap)
    last = _ends(literal)[-1]
    return _spliced(text, last.end_lineno or 0, last.end_col_offset or 0, gap + item)


def _spread(text: str, literal: Literal) -> str:
    """A literal of one line with a line for each element."""
    lines = text.splitlines(keepends=True)
    line = lines[literal.lineno - 1].encode()
    items = [line[key.col_offset : end.end_col_offset] for key, end in zip(_keys(literal), _ends(literal), strict=True)]
    inner = b"".join(b"    " + item + b",\n" for item in items)
    opening, closing = line[: literal.col_offset + 1], line[(literal.end_col_offset or 0) - 1 :]
    lines[literal.lineno - 1] = (opening + b"\n" + inner + closing).decode()
    return "".join(lines)


def _spliced(text: str, line: int, column: int, addition: str) -> str:
    """Columns of a syntax tree count bytes."""
    lines = text.splitlines(keepends=True)
    raw = lines[line - 1].encode()
    lines[line - 1] = (raw[:column] + addition.encode() + raw[column:]).decode()
    return "".join(lines)


def _keys(literal: Literal) -> list[ast.expr]:
    return [key for key in literal.keys if key is not None] if isinstance(literal, ast.Dict) else literal.elts


def _ends(literal: Literal) -> list[ast.expr]:
    return literal.values if isinstance(literal, ast.Dict) else literal.elts


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: as import sorters have it."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _import_nodes(tree: ast.Module) -> list[ast.ImportFrom]:
    """Those of the module itself; where it loads lazily, those for type checkers."""
    body: list[ast.stmt] = tree.body
    if _literal(tree, LAZY_TABLE) is not None:
        blocks = [node for node in body if isinstance(node, ast.If)]
        body = [each for node in blocks if ast.unparse(node.test).endswith("TYPE_CHECKING") for each in node.body]
    found = [node for node in body if isinstance(node, ast.ImportFrom)]
    return [node for node in found if node.level == 0 and node.module != "__future__"]


def _literal(tree: ast.Module, name: str) -> Literal | None:
    """What a module's variable is set to, if it is a list, tuple or dict."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, Literal):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    return None


def _after_docstring(tree: ast.Module) -> int:
    """How many lines it takes."""
    has_one = ast.get_docstring(tree, clean=False) is not None
    return tree.body[0].end_lineno or 0 if has_one else 0


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{where} must be Python that can be parsed, got {error}; mend it first") from None


CHECKOUT = Path("areal/workflow")
"""Where workflows go in a checkout of this package."""
PROJECT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


@dataclass(frozen=True)
class FileKind:
    suffix: str
    code: Template
    test: Template
    reward_fn: str = ""
    """What the constructor is given, by its import string."""


KINDS = {
    "workflow": FileKind("Workflow", WORKFLOW, WORKFLOW_TEST, "areal.reward.exact_match_reward"),
    "agent": FileKind("Agent", AGENT, AGENT_TEST),
}


@dataclass(frozen=True)
class NewFiles:
    files: dict[Path, str]
    """What each file is to hold."""
    commands: dict[str, str]
    """What to do with them: verb -> the line that does it."""

    def write(self) -> list[str]:
        """Write what differs; a line for each file, saying what happened to it."""
        return [f"{_write(path, text)}  {path}" for path, text in self.files.items()]


def make_plan(kind: str, name: str, into: str | None, *, force: bool) -> NewFiles:
    """Raises ConfigError for a bad name, a place that is none, or a file that would be overwritten."""
    what = KINDS[kind]
    _check_name(name)
    directory = _directory(into)
    root = _import_root(directory)
    package = ".".join(directory.resolve().relative_to(root.resolve()).parts)
    module = f"{package}.{name}" if package else name
    _check_shadow(module.partition(".")[0], root)
    class_name = _class_name(name, what.suffix)
    own = directory / f"{name}.py"
    test = _project_root(root) / "tests" / f"test_{name}_{kind}.py"
    for path in (own, test):
        if path.exists() and not force:
            raise ConfigError(f"areal new writes new files, but {path} exists; choose another name or add --force")
    inside = module.startswith("areal.")
    words = {
        "class_name": class_name,
        "module": module,
        # Import sorters keep a project's own modules apart from installed ones, and this package may be either.
        "blank_in_checkout": "\n" if inside else "",
        "blank_elsewhere": "" if inside else "\n",
    }
    files = {own: what.code.substitute(words)}
    if package:
        init = directory / "__init__.py"
        before = init.read_text(encoding="utf-8") if init.exists() else ""
        files[init] = with_name(before, module, class_name, str(init))
    files[test] = what.test.substitute(words)
    import_string = f"{module}.{class_name}"
    return NewFiles(files, _commands(import_string, test, what.reward_fn))


def _commands(workflow: str, test: Path, reward_fn: str) -> dict[str, str]:
    kwargs = f', workflow_kwargs={{"reward_fn": "{reward_fn}"}}' if reward_fn else ""
    return {
        "train it": f'trainer.train(workflow="{workflow}"{kwargs})',
        "test it": f"python -m pytest {test}",
        "check it": f"areal check {workflow}" + (f" reward_fn={reward_fn}" if reward_fn else ""),
    }


def _check_name(name: str) -> None:
    if keyword.iskeyword(name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        near = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_")
        offer = f"; try {near}" if near != name and re.fullmatch(r"[a-z][a-z0-9_]*", near) else ""
        raise ConfigError(f"a name must be a module's, small letters, digits and _, not a keyword, got {name!r}{offer}")


def _check_shadow(top: str, root: Path) -> None:
    """Refuse a new module or package that would hide one which this or other programs import."""
    is_new = not (root / top).exists() and not (root / f"{top}.py").exists()
    if is_new and importlib.util.find_spec(top) is not None:
        raise ConfigError(f"{top!r} is a module of Python or an installed one, which a new one would hide; rename it")


def _class_name(name: str, suffix: str) -> str:
    """`my_search` and `my_search_agent` are both MySearchAgent."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    return camel if camel.endswith(suffix) and camel != suffix else f"{camel}{suffix}"


def _directory(into: str | None) -> Path:
    if into is None:
        return CHECKOUT if (CHECKOUT / "__init__.py").is_file() else Path()
    directory = Path(into)
    bad = [part for part in directory.parts if part not in ("/", ".", "..") and not part.isidentifier()]
    if bad and not directory.is_dir():
        raise ConfigError(f"--into must be a package's directory, got {into!r}; {bad[0]!r} cannot be imported")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--into must be a directory, got the file {into!r}; name the package it belongs to")
    return directory


def _import_root(directory: Path) -> Path:
    """What must be on Python's path: the first directory above that is no package. A new directory becomes one."""
    if directory.exists() and not (directory / "__init__.py").is_file():
        return directory
    root = directory.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return _relative(root)


def _project_root(root: Path) -> Path:
    """Tests stand beside the package, or at the top of the project it belongs to (src layout)."""
    for candidate in (root.resolve(), *root.resolve().parents[:1]):
        if any((candidate / mark).exists() for mark in PROJECT_MARKS):
            return _relative(candidate)
    return root


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _write(path: Path, text: str) -> str:
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before == text:
        return "as it was"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return "written  " if before is None else "changed  "


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args.kind, args.name, args.into, force=args.force)
    print("\n".join([*plan.write(), ""]))
    for verb, line in plan.commands.items():
        print(f"{verb:<12}{line}")
    if importlib.util.find_spec("pytest_asyncio") is None:
        print("its test needs pytest and pytest-asyncio: pip install areal[test]", file=sys.stderr)
    return 0

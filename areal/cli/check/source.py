"""Coroutines that episodes make and drop: what a reader of the source cannot see, because it is made elsewhere."""

# MERGED-DOC
# Mistakes that can be seen in an episode's source: calls that block its event loop, and coroutines nobody awaits.
#
# Follows an episode through the methods of its class and the functions of its module, and no further. What it cannot
# tell for sure it leaves to the episodes that are played afterwards.

import ast
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.cli.check.report import Finding
from areal.infra.blocking_calls import by_method, by_name
from areal.infra.stalls import is_user_code, short_file

NEVER_AWAITED = "coroutine .* was never awaited"


@contextmanager
def noticed(known: Sequence[Finding]) -> Iterator[list[Finding]]:
    """Fills the list, at the end, with those of users' code that are not `known`. Other warnings are shown then."""
    found: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", NEVER_AWAITED, RuntimeWarning)
        yield found
    for warning in caught:
        finding = _finding(warning)
        if finding is None:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        elif not any(_is_same(finding, other) for other in (*known, *found)):
            found.append(finding)


def _finding(warning: warnings.WarningMessage) -> Finding | None:
    """None for a warning of another kind, or about a coroutine that libraries keep among themselves."""
    code = getattr(warning.source, "cr_code", None)
    if code is None:
        return None
    # It is dropped where it was made, or, if a variable held it, where its function was called from.
    places = ((warning.filename, warning.lineno), (code.co_filename, code.co_firstlineno))
    own = [f"{short_file(file)}:{line}" for file, line in places if is_user_code(file)]
    name = code.co_qualname.removesuffix(".__call__")
    what = f"{name}(...) is never awaited, so it never runs"
    return Finding(what, f"await {name}(...)", own[0]) if own else None


def _is_same(finding: Finding, other: Finding) -> bool:
    """A reader of the source writes `self.ask(...)` where the coroutine is called `Base.ask`."""
    method = finding.what.partition("(")[0].rpartition(".")[2]
    return finding.where == other.where or f"{method}(...) is never awaited" in other.what


Function = ast.FunctionDef | ast.AsyncFunctionDef

ASYNC_CLIENTS = ("openai.AsyncOpenAI", "openai.AsyncAzureOpenAI", "anthropic.AsyncAnthropic")
AWAITED = ("asyncio.sleep", "workflow_context.get_aiohttp_session", "workflow_context.get_httpx_client")
"""Names, or ends of names, of coroutine functions that episodes call."""
PLAIN = {"float", "int", "str", "bool", "len", "round", "max", "min", "sum", "print", "repr", "isinstance"}
"""Functions that want a value, so a coroutine given to them is a mistake."""
WRAPPER = "AsyncRewardWrapper"


def read_source(function: Callable[..., Any]) -> list[Finding]:
    """The mistakes of an asynchronous episode; none where there is no source, or where it runs in a thread."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None or not Path(code.co_filename).is_file():
        return []
    tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    for owner, node in _functions(tree):
        if node.name == code.co_name and code.co_firstlineno in (node.lineno, *(d.lineno for d in node.decorator_list)):
            if isinstance(node, ast.FunctionDef):
                return []
            return _Reader(tree, owner, short_file(code.co_filename)).read(node)
    return []


def _functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Every function with the class it is a method of."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield (node if isinstance(node, ast.ClassDef) else None), child


@dataclass
class _Reader:
    tree: ast.Module
    owner: ast.ClassDef | None
    file: str
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._names = dict(_imported(self.tree))
        self._functions = {node.name: node for node in self.tree.body if isinstance(node, Function)}
        body = self.owner.body if self.owner else []
        self._methods = {node.name: node for node in body if isinstance(node, Function)}
        self._attributes = dict(_attributes(self._methods.values()))
        self._read: set[str] = set()

    def read(self, function: Function) -> list[Finding]:
        """Those of the function and of what it calls."""
        if function.name in self._read:
            return self.found
        self._read.add(function.name)
        local = dict(_locals(function))
        for node in _own_nodes(function):
            if isinstance(node, ast.Call):
                self._check(node, local, function)
                callee = self._callee(node)
                if callee is not None:
                    self.read(callee)
        return self.found

    def _check(self, call: ast.Call, local: dict[str, ast.expr], function: Function) -> None:
        name = self._full_name(call.func)
        owner = self._made_by(call.func, local)
        awaited = isinstance(self._parents[call], ast.Await)
        blocking = by_name(name) or (by_name(owner) if not awaited and _is_request(call) else None)
        if blocking is None and isinstance(call.func, ast.Attribute) and not awaited:
            blocking = by_method(call.func.attr)
        if blocking is not None:
            self._add(call, f"{_shown(call)} blocks the event loop, and with it every other episode", blocking.remedy)
        elif name == "engine.generate":
            self._add(call, "engine.generate(...) does not exist for episodes", "await engine.agenerate(...)")
        elif name.startswith("aiofiles.") and isinstance(self._with_of(call), ast.With):
            self._add(call, f"{_shown(call)} is asynchronous, `with` is not", f"async with {_shown(call)}")
        elif owner == "reward_fn" and not awaited:
            remedy = f"self.{_attribute(call.func)} = {WRAPPER}(reward_fn) in __init__, and await it"
            self._add(call, f"{_shown(call)} runs the reward function in the event loop", remedy, prefix="")
        elif self._is_coroutine(call, name, owner) and self._is_forgotten(call, function):
            self._add(call, f"{_shown(call)} is never awaited, so it never runs", f"await {_shown(call)}", prefix="")

    def _add(self, node: ast.expr, what: str, remedy: str, prefix: str = "use ") -> None:
        self.found.append(Finding(what, f"{prefix}{remedy}", f"{self.file}:{node.lineno}"))

    def _full_name(self, node: ast.expr) -> str:
        """`sleep` as `time.sleep` where it was imported from there; empty for what has no name."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self._full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _made_by(self, node: ast.expr, local: dict[str, ast.expr]) -> str:
        """The class that made what is called (`client` of `client.chat.completions.create`), or `reward_fn`."""
        while isinstance(node, ast.Attribute) and not _attribute(node):
            node = node.value
        origin = self._attributes.get(_attribute(node)) or (local.get(node.id) if isinstance(node, ast.Name) else None)
        if origin is None:
            return ""
        made = [self._full_name(each.func) for each in ast.walk(origin) if isinstance(each, ast.Call)]
        if any(name.endswith(WRAPPER) for name in made):
            return WRAPPER
        return made[0] if made else origin.id if isinstance(origin, ast.Name) and origin.id == "reward_fn" else ""

    def _is_coroutine(self, call: ast.Call, name: str, owner: str) -> bool:
        callee = self._callee(call)
        if callee is not None:
            return isinstance(callee, ast.AsyncFunctionDef) and not _yields(callee)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "agenerate":
            return True
        return name.endswith(AWAITED) or owner == WRAPPER or (owner in ASYNC_CLIENTS and _is_request(call))

    def _is_forgotten(self, call: ast.expr, function: Function) -> bool:
        """Whether what is done with a coroutine can only be a mistake."""
        parent = self._parents[call]
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Name) and parent.func.id in PLAIN and call in parent.args
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            return self._is_misused(parent.targets[0].id, function)
        wrong = (
            ast.Expr,
            ast.Attribute,
            ast.Subscript,
            ast.BinOp,
            ast.Compare,
            ast.UnaryOp,
            ast.FormattedValue,
            ast.If,
        )
        return isinstance(parent, wrong) or (
            isinstance(parent, ast.Return) and isinstance(function, ast.AsyncFunctionDef)
        )

    def _is_misused(self, variable: str, function: Function) -> bool:
        """Whether a variable is used as a value and awaited nowhere."""
        uses = [node for node in _own_nodes(function) if isinstance(node, ast.Name) and node.id == variable]
        parents = [self._parents[use] for use in uses if isinstance(use.ctx, ast.Load)]
        handed_on = any(isinstance(parent, ast.Await | ast.List | ast.Tuple | ast.Starred) for parent in parents)
        return not handed_on and any(
            isinstance(each, ast.Attribute | ast.Subscript | ast.BinOp | ast.Compare) for each in parents
        )

    def _callee(self, call: ast.Call) -> Function | None:
        """The function of this module or method of this class that is called."""
        if isinstance(call.func, ast.Name):
            return self._functions.get(call.func.id)
        return self._methods.get(_attribute(call.func))

    def _with_of(self, call: ast.Call) -> ast.AST | None:
        item = self._parents[call]
        return self._parents[item] if isinstance(item, ast.withitem) else None


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local names of what is imported, with their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _attributes(methods: Any) -> Iterator[tuple[str, ast.expr]]:
    """`self.x = value` anywhere in a class."""
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((name, node.value) for target in targets if (name := _attribute(target)))


def _locals(function: Function) -> Iterator[tuple[str, ast.expr]]:
    """`x = value` and `with value as x` in a function."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            yield node.optional_vars.id, node.context_expr


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """What runs when the function does: functions defined in it may run elsewhere, or never."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop(0)
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            stack[:0] = ast.iter_child_nodes(node)


def _attribute(node: ast.expr) -> str:
    """`x` of `self.x`, else nothing."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else ""


def _is_request(call: ast.Call) -> bool:
    """Whether a method of a client is called that talks to the model."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("create", "parse", "retrieve")


def _yields(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))


def _shown(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}(...)"

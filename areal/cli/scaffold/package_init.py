"""A name added to a package's `__init__.py`: its import, its place in `__all__`, and nothing else moved.

Text is inserted, never written anew, so comments and order stay; the result is parsed before it is handed over. A
package that loads its names on first use (a `_HOMES` table, and imports under TYPE_CHECKING) stays like that.
"""

import ast

from areal.api.errors import ConfigError

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

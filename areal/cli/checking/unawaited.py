"""Coroutines that episodes make and drop: what a reader of the source cannot see, because it is made elsewhere."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal.cli.checking.findings import Finding
from areal.infra.stack import is_user_code, short_file

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

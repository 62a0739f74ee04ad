"""Names of functions in messages, and whether they must be awaited."""

import math
from functools import partial

from areal.utils.callables import is_async, name_of


def double(x: int) -> int:
    return 2 * x


async def double_later(x: int) -> int:
    return 2 * x


class Judge:
    async def __call__(self) -> float:
        return 1.0


class Scorer:
    def __call__(self) -> float:
        return 1.0

    async def later(self) -> float:
        return 1.0


def test_function_class_and_object_are_named_by_module_and_name() -> None:
    assert name_of(double) == f"{__name__}.double"
    assert name_of(Judge) == f"{__name__}.Judge"
    assert name_of(Judge()) == f"{__name__}.Judge"
    assert name_of(Scorer().later) == f"{__name__}.Scorer.later"


def test_partial_has_the_name_of_its_function() -> None:
    assert name_of(partial(partial(double, 1))) == f"{__name__}.double"


def test_import_string_is_its_own_name() -> None:
    assert name_of("my_agents.Solver") == "my_agents.Solver"


def test_function_without_a_module_is_named_all_the_same() -> None:
    assert name_of(math.sqrt) == "math.sqrt"
    assert name_of(str.join) == "str.join"


def test_async_functions_methods_partials_and_callable_objects_are_awaited() -> None:
    assert all(is_async(each) for each in (double_later, partial(double_later, 1), Judge(), Scorer().later))


def test_what_returns_at_once_is_not_awaited() -> None:
    assert not any(is_async(each) for each in (double, partial(double, 1), Scorer(), Judge, len))

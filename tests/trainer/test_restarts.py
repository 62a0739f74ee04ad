from areal.trainer.processes import HOUR_SECONDS, RestartBudget


def test_budget_allows_so_many_restarts_within_an_hour() -> None:
    now = [0.0]
    budget = RestartBudget(2, clock=lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now[0] = HOUR_SECONDS - 1
    assert not budget.spend()
    now[0] = HOUR_SECONDS
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_budget_of_none_allows_none() -> None:
    assert not RestartBudget(0).spend()

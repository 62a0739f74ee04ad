import pytest

from benchmarks.memory import MAPPED_CASES, Case, compare


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MAPPED_CASES, ids=lambda case: case.name)
def test_the_estimate_is_near_what_a_process_takes(case: Case) -> None:
    figures, aims = compare([case])
    assert all(aim.met for aim in aims), figures

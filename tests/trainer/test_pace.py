from areal.trainer.journal import WINDOW_STEPS, Pace


def test_a_burst_and_a_pause_average_out_over_the_window() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    rates = []
    for step in range(40):
        now[0] += 0.1 if step % 2 else 1.9
        rates.append(pace.step(100))
    assert rates[0] == 100 / 1.9
    assert all(abs(rate - 100) < 1e-6 for rate in rates[WINDOW_STEPS - 1 :: 2])
    assert max(rates) < 115


def test_old_steps_are_forgotten() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for tokens in [1000] * 5 + [10] * WINDOW_STEPS:
        now[0] += 1
        rate = pace.step(tokens)
    assert rate == 10

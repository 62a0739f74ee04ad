"""How `benchmarks.install` counts: packages that only torch needs are torch's, and a reward has to rise for a while."""

import zipfile
from pathlib import Path

import pytest

from benchmarks.install import closure, name_of, rewards_in, risen


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    wanted = {
        "areal-agents": [
            "torch>=2.8",
            "NumPy>=2",
            "rich; extra == 'demo'",
            "httpx[http2]",
            "tomli; python_version < '3'",
        ],
        "torch": ["sympy", "numpy"],
        "sympy": ["mpmath"],
        "mpmath": [],
        "numpy": [],
        "rich": [],
        "httpx": ["h2; extra == 'http2'", "anyio"],
        "h2": ["httpx"],
        "anyio": [],
    }
    for name, needs in wanted.items():
        lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
        with zipfile.ZipFile(tmp_path / f"{name.replace('-', '_')}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}\n"
            )
    return {name_of(path): path for path in tmp_path.glob("*.whl")}


def test_what_only_torch_needs_is_not_counted(wheels: dict[str, Path]) -> None:
    assert closure("areal-agents", wheels) == {"areal-agents", "numpy", "httpx", "h2", "anyio"}
    assert closure("areal-agents", wheels, through_torch=True) - closure("areal-agents", wheels) == {
        "torch",
        "sympy",
        "mpmath",
    }


def test_reward_has_risen_when_later_steps_are_better_than_the_first() -> None:
    assert not risen([0.3] * 10)
    assert not risen([0.3] * 40)
    assert not risen([0.3] * 10 + [0.34] * 10)
    assert risen([0.3] * 10 + [0.36] * 10)
    assert not risen([0.1] * 9 + [0.9] * 2), "the first steps must be over"


def test_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert rewards_in(metrics) == []
    metrics.write_text('{"step":0,"eval_reward":0.5}\n{"step":1,"reward":0.25}\n{"step":2,"rew')
    assert rewards_in(metrics) == [0.25]

"""Every shipped reward function has the shipped signature and can be named in a config."""

import inspect
import subprocess
import sys

import pytest

import areal.reward
from areal.rollout.loading import import_object

FUNCTIONS = [name for name in areal.reward.__all__ if name.endswith("_reward")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_import_string_names_it(name: str) -> None:
    libraries = {"math_verify_reward": "math_verify", "reasoning_gym_reward": "reasoning_gym"}
    if name in libraries:
        pytest.importorskip(libraries[name])
    function = import_object(f"areal.reward.{name}", "reward_fn")
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:4] == ["prompt", "completion", "prompt_ids", "completion_ids"]
    assert list(parameters.values())[-1].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.slow
def test_the_package_itself_loads_none_of_their_libraries() -> None:
    code = "import sys, areal.reward\nassert not {'sympy', 'math_verify', 'areal.reward.sandbox'} & set(sys.modules)\n"
    code += "assert not hasattr(areal.reward, 'nothing')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

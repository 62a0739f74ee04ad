"""Programs out of completions, against tests of both kinds."""

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.errors import ConfigError
from areal.api.reward_api import AsyncRewardWrapper
from areal.reward import SandboxLimits, code_reward
from areal.reward.code import extract_program
from areal.reward.sandbox import ORDER, find_isolation

pytestmark = pytest.mark.slow

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
PAIRS = [{"input": "3 4\n", "output": "7"}, {"input": "1 1", "output": "2  \n"}]
ASSERTS = ["assert add(3, 4) == 7", "assert add(1, 1) == 2"]


def reward(completion: str, tests: Any, **more: Any) -> float:
    return code_reward("q", completion, [1], [2], tests=tests, difficulty="easy", **more)


@pytest.mark.parametrize(
    ("completion", "tests"),
    [
        (SUM, PAIRS),
        (ADD, ASSERTS),
        (ADD, json.dumps(ASSERTS)),
        (ADD + "\nprint(add(*map(int, input().split())))", [ASSERTS[0]]),
        ("def add(a, b): return a + b\nprint(int(*[input()]) if 0 else 7)", [*ASSERTS, {"input": "", "output": "7"}]),
    ],
)
def test_a_program_that_passes_every_test_scores_one(completion: str, tests: Any) -> None:
    assert reward(completion, tests) == 1.0


@pytest.mark.parametrize(
    ("completion", "tests"),
    [
        ("```python\nprint(7)\n```", PAIRS),
        (SUM + "\n", [{"input": "three", "output": "7"}]),
        ("```python\nprint(7)\nraise SystemExit(1)\n```", PAIRS[:1]),
        (ADD.replace("+", "-"), ASSERTS),
        ("```python\ndef add(a, b):\n    return a +\n```", ASSERTS),
        ("```python\nimport os\nos._exit(0)\n```", ASSERTS),
        ("raise SystemExit", ASSERTS),
        ("I do not know.", ASSERTS),
        ("", PAIRS),
    ],
)
def test_a_program_that_fails_one_scores_zero(completion: str, tests: Any) -> None:
    assert reward(completion, tests) == 0.0


def test_a_program_that_never_ends_scores_zero_at_its_own_deadline() -> None:
    assert reward("while True: pass", [*PAIRS, *PAIRS], limits=SandboxLimits(1)) == 0.0


HOSTILE = {
    "kills its group": "os.kill(0, 9)",
    "kills everyone": "os.kill(-1, 9)",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "forks for ever": "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "takes all memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "takes all memory often": "for _ in 'abc': os.fork()\nkept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "fills the disk": "for n in range(10**9): open(f'{n}', 'wb').write(bytes(1 << 20))",
    "fills shared memory": "for n in range(10**9): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))",
    "prints for ever": "while True: print('7' * 1000)",
    "closes everything": "os.closerange(0, 1000)",
    "leaves a daemon": "if os.fork() == 0:\n    os.setsid()\n    while True: pass\nraise SystemExit(1)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "recurses without end": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "opens the network": "import socket; socket.create_connection(('127.0.0.1', 22))",
    "stops itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "reads keys": "print(open(os.path.expanduser('~/.ssh/id_rsa')).read())",
    "writes to /proc": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "writes no text": "sys.stdout.buffer.write(bytes(range(256)) * 100)",
    "is no text": "\ud800\0",
}


@pytest.mark.parametrize("isolation", [*ORDER, "none"])
@pytest.mark.parametrize("action", HOSTILE)
def test_whatever_a_program_does_it_is_a_wrong_answer(action: str, isolation: Any) -> None:
    if isolation == "none" and action in ("fills the disk", "fills shared memory"):
        pytest.skip("nothing protects the machine from that")
    if isolation == "none" and action == "kills everyone" and os.getuid() != 0:
        pytest.skip("nothing protects the processes of this user from that")
    try:
        find_isolation(isolation)
    except ConfigError as error:
        pytest.skip(str(error))
    program = f"import os, sys\n{HOSTILE[action]}"
    tests = [{"input": "", "output": "7"}]
    assert reward(program, tests, limits=SandboxLimits(2), isolation=isolation) == 0.0


@pytest.mark.parametrize("tests", [[], "[]", [3], [{"input": "3"}], [None]])
def test_what_is_no_test_is_refused(tests: Any) -> None:
    with pytest.raises(ValueError, match="tests must be a list of"):
        reward(SUM, tests)


async def test_it_runs_in_a_reward_pool() -> None:
    wrapper = AsyncRewardWrapper(code_reward, 60)
    assert await wrapper("q", SUM, [], [], tests=PAIRS) == 1.0
    assert await wrapper("q", ADD, [], [], tests=PAIRS) == 0.0


@given(
    programs=st.lists(st.text(st.characters(exclude_characters="`\r"), min_size=1), min_size=1, max_size=3),
    language=st.sampled_from(["", "python", "py", "Python 3"]),
)
def test_the_last_fenced_block_is_the_program_whatever_it_holds(programs: list[str], language: str) -> None:
    completion = "Some words.\n".join(f"```{language}\n{program}\n```\n" for program in programs)
    assert extract_program(completion) == programs[-1] + "\n"


def test_a_block_that_is_cut_off_counts_and_text_without_one_is_the_program() -> None:
    assert extract_program("```python\nprint(1)\n```\nor\n```python\nprint(2)") == "print(2)"
    assert extract_program("print(3)") == "print(3)"

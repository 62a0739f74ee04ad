"""What `workflow=` takes."""

import importlib
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from areal.api.errors import WorkflowError
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.config.rollout import GenerationHyperparameters
from areal.rollout import loading
from areal.rollout.loading import Fillers, WorkflowSpec, check, is_rollout_workflow, load, unused_reward

TOKENIZER = object()
GCONFIG = GenerationHyperparameters(max_new_tokens=5)

MODULE = """
made = []

class MyAgent:
    def __init__(self, size=1):
        made.append(self)
        self.size = size

    async def run(self, data, **extra_kwargs):
        return 1.0

class Heavy:
    def __init__(self):
        raise OSError("no such index")

    async def run(self, data):
        return 1.0

instance = MyAgent(3)

async def agent(data):
    return 0.5

async def episode(engine, data):
    return None

def score(prompt, completion):
    return 2.0

secret = 42
"""


class Agent:
    def __init__(self, size=1):
        self.size = size

    async def run(self, data, **extra_kwargs):
        return 1.0


class Caller:
    async def __call__(self, data):
        return 1.0


class CallerHeir(Caller):
    pass


class Episode(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, max_turns=1):
        self.reward_fn, self.gconfig, self.tokenizer, self.max_turns = reward_fn, gconfig, tokenizer, max_turns

    async def arun_episode(self, engine, data):
        return None


class EpisodeHeir(Episode):
    """Names nothing that the config fills, but hands it on."""

    def __init__(self, colour, **kwargs):
        super().__init__(**kwargs)
        self.colour = colour


async def agent_function(data):
    return 1.0


async def with_prefix(prefix, data):
    return 1.0


async def episode_function(engine, data):
    return None


def score(prompt, completion):
    return 1.0


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    """The name of a user's module, outside the package."""
    (tmp_path / "users_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    return "users_own"


def loaded(target, kwargs=None, **fillers):
    """What a worker makes of it, after the way there."""
    spec = WorkflowSpec(target, kwargs or {})
    check(spec, fillers.get("reward_fn", ""))
    return load(WorkflowSpec.unpack(spec.pack()), Fillers(**{"gconfig": GCONFIG, "tokenizer": TOKENIZER, **fillers}))


@pytest.mark.parametrize("target", [Agent, Agent(), Caller, CallerHeir, Caller(), agent_function, lambda data: 1.0])
def test_agent_of_every_shape_is_accepted(target):
    assert not is_rollout_workflow(loaded(target))


def test_partial_of_a_function_is_an_agent():
    assert not is_rollout_workflow(loaded(partial(with_prefix, "x")))


@pytest.mark.parametrize("target", [Episode, Episode(score, GCONFIG, None), episode_function])
def test_rollout_workflow_of_every_shape_is_accepted(target):
    assert is_rollout_workflow(loaded(target, reward_fn=f"{__name__}.score" if target is Episode else ""))


def test_import_string_names_a_class_an_instance_or_a_function(my_module):
    assert loaded(f"{my_module}.MyAgent").size == 1
    assert loaded(f"{my_module}.instance").size == 3
    assert loaded(f"{my_module}.agent").__name__ == "agent"
    assert is_rollout_workflow(loaded(f"{my_module}.episode"))


def test_check_constructs_nothing(my_module):
    import users_own

    before = len(users_own.made)
    check(WorkflowSpec(f"{my_module}.MyAgent"))
    assert len(users_own.made) == before


def test_workflow_kwargs_are_constructor_arguments():
    assert loaded(Agent, {"size": 9}).size == 9


def test_workflow_kwargs_for_something_already_made_are_refused():
    with pytest.raises(WorkflowError, match=r"constructor arguments, but .*Agent is not a class.*leave out size"):
        check(WorkflowSpec(Agent(), {"size": 9}))


def test_what_a_constructor_names_and_the_user_leaves_out_is_filled_from_the_config():
    workflow = loaded(Episode, {"max_turns": 3}, reward_fn=f"{__name__}.score")
    assert workflow.reward_fn("", "") == 1.0
    assert (workflow.gconfig, workflow.tokenizer, workflow.max_turns) == (GCONFIG, TOKENIZER, 3)


def test_what_a_user_passes_wins_over_the_config():
    own = GenerationHyperparameters(max_new_tokens=9)
    workflow = loaded(Episode, {"reward_fn": score, "gconfig": own}, reward_fn="nowhere.at_all")
    assert workflow.gconfig == own
    assert workflow.reward_fn is score


def test_constructor_that_hands_keywords_on_to_its_base_is_filled_too():
    workflow = loaded(EpisodeHeir, {"colour": "red"}, reward_fn=f"{__name__}.score")
    assert (workflow.colour, workflow.tokenizer) == ("red", TOKENIZER)


def test_agent_that_collects_any_keywords_gets_none_it_did_not_ask_for():
    class Collector:
        def __init__(self, **kwargs):
            self.kwargs = kwargs

        async def run(self, data):
            return 1.0

    assert loaded(Collector, {"a": 1}).kwargs == {"a": 1}


def test_strings_for_reward_and_tokenizer_are_resolved(my_module, tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tok")
    workflow = loaded(Episode, {"reward_fn": f"{my_module}.score", "tokenizer": str(tmp_path / "tok")})
    assert workflow.reward_fn("", "") == 2.0
    assert workflow.tokenizer.encode("1259") == tokenizer.encode("1259")


def test_empty_strings_for_reward_and_tokenizer_leave_them_to_the_config():
    workflow = loaded(Episode, {"reward_fn": "", "tokenizer": ""}, reward_fn=f"{__name__}.score")
    assert workflow.tokenizer is TOKENIZER
    assert workflow.reward_fn("", "") == 1.0


def test_missing_reward_is_refused_with_both_remedies():
    with pytest.raises(WorkflowError, match=r"'reward_fn'.*workflow_kwargs, or set reward_fn in the config"):
        loaded(Episode)


@pytest.mark.parametrize("kwargs", [{}, {"colour": 1, "reward_fn": "nowhere.score"}])
def test_constructor_arguments_that_no_config_completes_are_refused_in_the_driver(kwargs):
    with pytest.raises(
        WorkflowError, match=r"missing a required argument: 'colour'|'nowhere.score' cannot be imported"
    ):
        check(WorkflowSpec(EpisodeHeir, kwargs))


def test_unknown_constructor_argument_is_refused_by_name():
    with pytest.raises(WorkflowError, match="unexpected keyword argument 'sise'"):
        check(WorkflowSpec(Agent, {"sise": 1}))


def test_constructor_that_raises_is_told_with_its_place(my_module):
    with pytest.raises(
        WorkflowError, match=r"users_own.Heavy could not .*OSError: no such index \(.*users_own.py:\d+\)"
    ):
        loaded(f"{my_module}.Heavy")


def test_abstract_class_is_refused_with_what_it_lacks():
    with pytest.raises(WorkflowError, match="does not define arun_episode"):
        check(WorkflowSpec(RolloutWorkflow))


@pytest.mark.parametrize("target", [None, 3, object, object()])
def test_what_cannot_run_an_episode_is_refused_with_the_shapes_that_can(target):
    with pytest.raises(WorkflowError, match=r"async def run\(self, data, \*\*extra_kwargs\)"):
        check(WorkflowSpec(target))


def test_import_string_without_a_module_is_refused():
    with pytest.raises(WorkflowError, match=r"import string like my_module.MyAgent, got 'MyAgent'"):
        check(WorkflowSpec("MyAgent"))


def test_import_error_is_kept():
    with pytest.raises(WorkflowError, match="No module named 'nowhere_to_be_found'; start it in the direc") as caught:
        check(WorkflowSpec("nowhere_to_be_found.Agent"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_module_that_lacks_another_is_not_said_to_be_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "lacking_module.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkflowError, match=r"No module named 'nowhere_to_be_found'$"):
        check(WorkflowSpec("lacking_module.Agent"))


@pytest.mark.parametrize(
    ("target", "told"),
    [(Episode, ""), (Agent, "reward_fn=my.reward is not used: .*Agent takes no reward_fn, and what its episodes")],
)
def test_reward_function_that_a_workflow_is_not_given_is_told(target, told):
    assert re.match(told or "$", unused_reward(WorkflowSpec(target), "my.reward"))
    assert unused_reward(WorkflowSpec(target), "") == ""


def test_module_that_raises_on_import_is_told_with_what_it_raised(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("limits = {}['depth']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkflowError, match="cannot be imported: KeyError: 'depth'") as caught:
        check(WorkflowSpec("broken_module.Agent"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_attribute_is_told_what_the_module_has_nearest_first(my_module):
    with pytest.raises(WorkflowError, match="has no MyAgnet; it has MyAgent, Heavy, agent, episode, score"):
        check(WorkflowSpec(f"{my_module}.MyAgnet"))


def test_object_that_cannot_travel_is_refused_with_the_reason():
    agent = Agent()
    agent.lock = threading.Lock()
    with pytest.raises(WorkflowError, match=r"Agent cannot be sent to a rollout worker: .*lock"):
        WorkflowSpec(agent).pack()


def test_what_a_worker_cannot_read_is_told(my_module):
    packed = WorkflowSpec(loaded(f"{my_module}.MyAgent")).pack()
    del sys.modules[my_module]
    sys.path = [path for path in sys.path if "test_what_a_worker" not in path]
    with pytest.raises(WorkflowError, match="No module named 'users_own'"):
        WorkflowSpec.unpack(packed)


def test_closures_travel():
    reward = 0.75

    class Local:
        async def run(self, data):
            return reward

    agent = loaded(Local)
    with pytest.raises(StopIteration) as stop:
        agent.run({}).send(None)
    assert stop.value.value == 0.75


@pytest.mark.slow
def test_classes_of_a_script_travel_to_another_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from areal.rollout.loading import WorkflowSpec\n"
        "class Agent:\n"
        "    async def run(self, data):\n"
        "        return 0.25\n"
        "open(sys.argv[1], 'wb').write(WorkflowSpec(Agent).pack())\n"
    )
    subprocess.run([sys.executable, script, tmp_path / "packed"], check=True, timeout=60)
    agent: Any = load(WorkflowSpec.unpack((tmp_path / "packed").read_bytes()), Fillers(GCONFIG, None))
    with pytest.raises(StopIteration) as stop:
        agent.run({}).send(None)
    assert stop.value.value == 0.25


@pytest.mark.slow
def test_resolving_workflows_loads_no_torch():
    code = "import sys, areal.rollout.worker, areal.rollout.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_spec_is_plain_data_on_its_way():
    spec = WorkflowSpec("a.B", {"size": 1})
    assert pickle.loads(pickle.dumps(spec)) == spec


LOAD_ELSEWHERE = """
import sys
from areal.rollout.loading import Fillers, WorkflowSpec, load
agent = load(WorkflowSpec.unpack(sys.stdin.buffer.read()), Fillers(None, None, sys.argv[1]))
print(type(agent).__name__, agent.size, agent.__class__.__module__ in sys.modules)
"""
SCORE_ELSEWHERE = """
import asyncio, sys
from areal.api.reward_api import AsyncRewardWrapper
from areal.rollout.loading import Fillers, WorkflowSpec, load
workflow = load(WorkflowSpec.unpack(sys.stdin.buffer.read()), Fillers(None, None, sys.argv[1]))
print(asyncio.run(AsyncRewardWrapper(workflow.reward_fn)("prompt", "completion")))
"""
REWARDS = """
from functools import partial
from only_here import score

FACTOR = 10

class Judge:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, prompt, completion):
        return self.score(prompt, completion)

    def score(self, prompt, completion):
        return self.factor * score(prompt, completion)

def tenfold(prompt, completion):
    return FACTOR * score(prompt, completion)

def _times(prompt, completion, factor):
    return factor * score(prompt, completion)

thirtyfold = partial(_times, factor=30)
"""


def _load_elsewhere(code: str, packed: bytes, reward_fn: str = "") -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-c", code, reward_fn]
    done = subprocess.run(argv, input=packed, capture_output=True, timeout=60)
    return subprocess.CompletedProcess(argv, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules that no other process finds."""
    (tmp_path / "only_here.py").write_text(MODULE)
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_rewards")
    for name in ("only_here", "own_rewards"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
def test_a_module_of_the_users_own_travels_to_a_host_that_does_not_have_it() -> None:
    spec = WorkflowSpec("only_here.MyAgent", {"size": 7})
    refused = _load_elsewhere(LOAD_ELSEWHERE, spec.pack()).stderr
    assert "No module named 'only_here'" in refused
    loaded = _load_elsewhere(LOAD_ELSEWHERE, spec.pack(by_value=True))
    assert loaded.stdout.split() == ["MyAgent", "7", "False"], loaded.stderr
    assert "only_here" not in cloudpickle.list_registry_pickle_by_value()


REWARD_FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "an import string": (lambda rewards: "own_rewards.tenfold", 20.0),
    "an import string of a partial": (lambda rewards: "own_rewards.thirtyfold", 60.0),
    "a function": (lambda rewards: rewards.tenfold, 20.0),
    "a partial": (lambda rewards: partial(rewards._times, factor=2), 4.0),
    "an instance": (lambda rewards: rewards.Judge(5), 10.0),
    "a bound method": (lambda rewards: rewards.Judge(6).score, 12.0),
    "a wrapper": (lambda rewards: AsyncRewardWrapper(rewards.tenfold).reward_fn, 20.0),
    "a lambda": (lambda rewards: lambda prompt, completion: 7.0, 7.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REWARD_FUNCTIONS)
def test_a_reward_function_of_the_users_own_travels_to_a_host_that_does_not_have_it(
    kind: str, own_modules: Any
) -> None:
    make, reward = REWARD_FUNCTIONS[kind]
    packed = WorkflowSpec(Episode, {"reward_fn": make(own_modules)}).pack(by_value=True)
    scored = _load_elsewhere(SCORE_ELSEWHERE, packed)
    assert scored.stdout.split() == [str(reward)], scored.stderr
    assert not cloudpickle.list_registry_pickle_by_value()


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
def test_the_reward_function_of_the_config_travels_too() -> None:
    packed = WorkflowSpec(Episode).pack(by_value=True, reward_fn="own_rewards.tenfold")
    scored = _load_elsewhere(SCORE_ELSEWHERE, packed, "own_rewards.tenfold")
    assert scored.stdout.split() == ["20.0"], scored.stderr


@pytest.mark.slow
def test_a_module_that_is_not_there_is_named_with_the_remedy(own_modules: Any) -> None:
    refused = _load_elsewhere(SCORE_ELSEWHERE, WorkflowSpec(Episode, {"reward_fn": own_modules.tenfold}).pack())
    assert "No module named" in refused.stderr
    assert "install it on that host, or set PYTHONPATH" in refused.stderr


def test_a_reward_function_that_cannot_travel_is_refused_with_the_remedy() -> None:
    lock = threading.Lock()
    spec = WorkflowSpec(Episode, {"reward_fn": lambda prompt, completion: float(lock.locked())})
    with pytest.raises(WorkflowError, match=r"cannot be sent to a rollout worker: TypeError.*make in __init__"):
        spec.pack(by_value=True)
    assert not cloudpickle.list_registry_pickle_by_value()


def test_installed_modules_travel_by_name() -> None:
    packed = WorkflowSpec("areal.workflow.openai.math_agent.MathAgent").pack(by_value=True)
    assert pickle.loads(packed).target == "areal.workflow.openai.math_agent.MathAgent"


def test_an_installed_reward_function_travels_by_name() -> None:
    spec = WorkflowSpec("areal.workflow.RLVRWorkflow")
    packed = spec.pack(by_value=True, reward_fn="areal.reward.exact_match_reward")
    assert pickle.loads(packed).kwargs == {"reward_fn": "areal.reward.exact_match_reward"}


def test_an_agent_that_takes_no_reward_function_is_given_none() -> None:
    packed = WorkflowSpec("areal.workflow.openai.math_agent.MathAgent").pack(
        by_value=True, reward_fn="areal.reward.exact_match_reward"
    )
    assert pickle.loads(packed).kwargs == {}


def test_an_episode_is_a_row_only_where_its_own_class_says_how() -> None:
    class InRows(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return None

        async def arun_row(self, engine, data):
            return None

    class Heir(InRows):
        pass

    class Anew(Heir):
        async def arun_episode(self, engine, data):
            return await super().arun_episode(engine, data)

    changed = InRows()
    changed.arun_episode = lambda engine, data: None
    called = [loading.episode_function(each).__name__ for each in (InRows(), Heir(), Anew(), changed)]
    assert called == ["arun_row", "arun_row", "arun_episode", "<lambda>"]
    assert loading.episode_function(episode_function) is episode_function

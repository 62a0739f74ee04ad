"""A Harbor task in a sandbox: the model's script is run where the task's files are, then the task's tests score it.

No container is made. What a Dockerfile copies and runs is done in the sandbox of `areal/reward/sandbox`, with this
machine's programs and no network; so are the model's scripts and the tests. Each is run in a sandbox of its own, and
only files go from one to the next: what the model started does not see the tests, and cannot wait for them.
"""

import asyncio
import base64
import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.engine_api import InferenceEngine
from areal.api.errors import RewardInvalid, WorkflowError
from areal.api.reward_api import as_reward
from areal.config.errors import require
from areal.config.rollout import GenerationHyperparameters
from areal.dataset.harbor import ANSWER_FILE, HOME, PROGRAMS_PATH, CopiedFiles, HarborTask
from areal.infra import workflow_context
from areal.reward.code import extract_program
from areal.reward.sandbox import Isolation, ProgramStop, SandboxLimits, find_isolation, run_program
from areal.reward.sandbox.launcher.isolation import WRITABLE_NAMES
from areal.trajectory import Tree, assign_reward, export
from areal.trajectory.tensors import tensors_of_rows
from areal.utils import stats_tracker
from areal.utils.background import in_thread
from areal.utils.bounded_cache import BoundedCache
from areal.workflow.rlvr import RLVRWorkflow

if TYPE_CHECKING:
    from torch import Tensor

ISOLATION: Isolation = "namespaces"
"""The only kind in which programs may write files and start others."""
SHOWN_CHARACTERS = 4000
"""Of what a script printed, from its end."""
_MAX_PREPARED = 256
_UNPACKING_SECONDS = 30.0
_LIMITS = SandboxLimits(memory_bytes=1 << 30, output_bytes=32 << 20, processes=64, open_files=256)
_WRITABLE = ", ".join(f"/{name}" for name in WRITABLE_NAMES)
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)

T = TypeVar("T")
Workspace = tuple[str, ...]
"""Archives that are unpacked one after the other, as text."""

_PROGRAM = """
import base64, io, json, os, subprocess, sys, tarfile
job = json.load(sys.stdin)
os.chdir("/scratch")
for name in ("home", "logs/verifier", "tmp", job["workdir"]):
    os.makedirs(name, exist_ok=True)
for archive in job["workspace"]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        tar.extractall(".", filter="fully_trusted")
programs = job["programs"]
variables = {"PATH": programs, "HOME": job["home"], "TMPDIR": "/tmp", "LANG": "C.UTF-8"} | job["variables"]
variables["PATH"] = variables["PATH"].replace(programs, f"{os.path.dirname(sys.executable)}:{programs}")
with open("printed", "w+b") as printed:
    try:
        status = subprocess.run(
            job["command"], cwd="/" + job["workdir"], env=variables, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, timeout=job["seconds"],
        ).returncode
    except subprocess.TimeoutExpired:
        status = None
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - job["shown"]))
    text = printed.read().decode(errors="replace")
archive = io.BytesIO()
if job["keep"]:
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name in filter(os.path.lexists, job["keep"]):
            tar.add(name)
rewards = {}
for name in ("reward.json", "reward.txt"):
    try:
        with open(f"logs/verifier/{name}", encoding="utf-8") as file:
            rewards[name] = file.read(65536)
    except (OSError, ValueError):
        pass
end = {"status": status, "text": text, "rewards": rewards}
print(json.dumps(end | {"workspace": base64.b64encode(archive.getvalue()).decode()}))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int | None
    """None = it was killed at its deadline, or ended its own sandbox."""
    text: str
    """The end of what it printed."""
    rewards: dict[str, str]
    workspace: Workspace | None
    """What it left; None = nothing, because it ended its own sandbox."""


class HarborWorkflow(RLVRWorkflow):
    """Plays tasks of `harbor:DIRECTORY`; the reward is what their tests write.

    The script is the answer's last fenced block, or all of it. With several turns the model sees what its script
    printed and may send another; an answer without a fenced block ends the episode. With an `answer_file` the answer is
    written there and nothing is run. Before a task's first episode its tests are run on the untouched environment:
    tests that write no reward even then are refused; after that, tests which a solution keeps from writing one give 0.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 1,
        turn_discount: float = 1.0,
        answer_file: str = "",
        limits: SandboxLimits = _LIMITS,
    ) -> None:
        """`limits.timeout_seconds` does not count: a task says how long its scripts and its tests may take."""
        super().__init__(_not_called, gconfig, tokenizer)
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        require(0 <= turn_discount <= 1, f"turn_discount must lie in [0, 1], got {turn_discount}")
        find_isolation(ISOLATION)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.answer_file = answer_file
        self.limits = limits
        self._prepared: BoundedCache[str, asyncio.Task[_Prepared]] = BoundedCache(_MAX_PREPARED)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "dict[str, Tensor] | None":
        told = data.get("harbor")
        if not isinstance(told, dict) or "directory" not in told:
            raise WorkflowError(
                "HarborWorkflow needs a task with `harbor`, got the keys "
                f"{', '.join(map(repr, data)) or 'none'}; read tasks from harbor:DIRECTORY"
            )
        prepared = await self._prepare(told["directory"])
        answer_file = told.get(ANSWER_FILE, self.answer_file)
        tree = Tree(self._renderer)
        messages = list(self._messages(data))
        workspace: Workspace | None = prepared.workspace
        while len(tree.completions) < self.max_turns and workspace is not None:
            prompt = await self._continued(tree, messages)
            response = await self._ask(engine, prompt.ids)
            if response is None:
                return None
            answer = self._read(response, thinking=prompt.thinking)
            node = tree.add(
                prompt, response, answer, completion_id=uuid.uuid4().hex, temperature=self.gconfig.sampling_temperature
            )
            text = answer.message["content"] or ""
            if answer_file:
                workspace = (*workspace, _archive_of_text(_place(answer_file), text))
                break
            if self.max_turns > 1 and not _FENCE.search(text):
                break
            ended = await _stoppable(partial(prepared.run_script, extract_program(text), workspace))
            workspace = ended.workspace
            messages += [node.message, {"role": "user", "content": _told(ended)}]
        reward = 0.0 if workspace is None else await _stoppable(partial(prepared.score, workspace))
        last = tree.completions[-1]
        assign_reward(tree, {last.id: reward}, "the tests of the task")
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, turns=len(tree.completions))
        return tensors_of_rows(export(tree, "individual", self.turn_discount))

    async def _prepare(self, directory: str) -> "_Prepared":
        """The task's files, once for all of its episodes; their failure is its failure."""
        known = self._prepared.get(directory)
        if known is None:
            known = asyncio.ensure_future(in_thread(_prepare, Path(directory), self.limits))
            self._prepared.put(directory, known)
        return await asyncio.shield(known)


@dataclass(frozen=True)
class _Prepared:
    """A task whose environment is ready."""

    task: HarborTask
    workspace: Workspace
    limits: SandboxLimits

    def run_script(self, script: str, workspace: Workspace, stop: ProgramStop) -> Ended:
        command = ["bash", "-c", script]
        return self._run(command, self.task.workdir, self.task.variables, workspace, self.task.agent_seconds, stop=stop)

    def score(self, workspace: Workspace, stop: ProgramStop) -> float:
        return self._reward(workspace, stop)[0] or 0.0

    def check(self) -> None:
        """Raises WorkflowError if the tests give no reward for an environment that nobody has touched."""
        reward, ended = self._reward(self.workspace)
        if reward is None:
            raise WorkflowError(
                f"tests/test.sh of {str(self.task.directory)!r} must write a number to /logs/verifier/reward.txt, or "
                f"to reward.json, in a sandbox without network; it {_how(ended)}; it printed: "
                f"{ended.text[-400:].strip()!r}"
            )

    def _reward(self, workspace: Workspace, stop: ProgramStop | None = None) -> tuple[float | None, Ended]:
        tests = _archive(CopiedFiles(self.task.directory / "tests", "/tests"), self.limits.disk_bytes)
        variables = self.task.variables | self.task.verifier_variables
        ended = self._run(
            ["bash", "/tests/test.sh"],
            self.task.workdir,
            variables,
            (*workspace, tests),
            self.task.verifier_seconds,
            keep=False,
            stop=stop,
        )
        return _written(ended.rewards), ended

    def _run(
        self,
        command: list[str],
        workdir: str,
        variables: dict[str, str],
        workspace: Workspace,
        seconds: float,
        *,
        keep: bool = True,
        stop: ProgramStop | None = None,
    ) -> Ended:
        kept = ["home", *(name for name in WRITABLE_NAMES if name not in ("logs", "solution", "tests"))] if keep else []
        job = {
            "command": command,
            "workdir": _place(workdir),
            "variables": variables,
            "programs": PROGRAMS_PATH,
            "home": HOME,
            "workspace": workspace,
            "seconds": seconds,
            "shown": SHOWN_CHARACTERS,
            "keep": kept,
        }
        limits = replace(self.limits, timeout_seconds=seconds + _UNPACKING_SECONDS)
        run = run_program(_PROGRAM, json.dumps(job), limits, isolation=ISOLATION, stop=stop)
        try:
            end = json.loads(run.output)
            left = (str(end["workspace"]),) if keep else None
            return Ended(end["status"], str(end["text"]), dict(end["rewards"]), left)
        except (ValueError, TypeError, KeyError, RecursionError):  # it killed what watches it, or filled the disk
            return Ended(None, run.errors[-SHOWN_CHARACTERS:], {}, None)


async def _stoppable(run: Callable[[ProgramStop], T]) -> T:
    """In a thread; an episode that is cancelled leaves no program behind."""
    stop = ProgramStop()
    try:
        return await in_thread(run, stop)
    except asyncio.CancelledError:
        stop.stop()
        raise


def _prepare(directory: Path, limits: SandboxLimits) -> _Prepared:
    task = HarborTask.read(directory)
    prepared = _Prepared(task, (), limits)
    for step in task.steps:
        if isinstance(step, CopiedFiles):
            prepared = replace(prepared, workspace=(*prepared.workspace, _archive(step, limits.disk_bytes)))
            continue
        ended = prepared._run(
            ["bash", "-c", step.command], step.workdir, step.variables, prepared.workspace, task.agent_seconds
        )
        if ended.status != 0 or ended.workspace is None:
            raise WorkflowError(
                f"the Dockerfile of {str(directory)!r} says `RUN {step.command:.120}`, which {_how(ended)} in a "
                f"sandbox without network, where only {_WRITABLE} can be written; it printed: "
                f"{ended.text[-400:].strip()!r}; leave the task out, or copy what it needs"
            )
        prepared = replace(prepared, workspace=ended.workspace)
    prepared.check()
    return prepared


def _place(path: str) -> str:
    """An absolute path as a name below the directory that can be written."""
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or parts[0] != "/" or parts[1] not in WRITABLE_NAMES or ".." in parts:
        raise WorkflowError(
            f"a Harbor task's files must lie in {_WRITABLE}, got {path!r}; change its WORKDIR or where it copies to"
        )
    return "/".join(parts[1:])


def _archive(copy: CopiedFiles, most_bytes: int) -> str:
    packed, place, size = io.BytesIO(), _place(copy.place), 0

    def count(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += entry.size
        if size > most_bytes:
            raise WorkflowError(
                f"the files of a Harbor task must fit into the sandbox's {most_bytes} bytes, those of "
                f"{str(copy.source)!r} do not; leave the task out, or raise `limits.disk_bytes`"
            )
        return entry

    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        if copy.source.is_dir():
            for below in sorted(os.listdir(copy.source)):
                tar.add(copy.source / below, f"{place}/{below}", filter=count)
        else:
            tar.add(copy.source, place, filter=count)
    return base64.b64encode(packed.getvalue()).decode()


def _archive_of_text(place: str, text: str) -> str:
    packed = io.BytesIO()
    data = text.encode(errors="replace")
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo(place)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return base64.b64encode(packed.getvalue()).decode()


def _written(rewards: dict[str, str]) -> float | None:
    """The number in the files that the tests wrote; None = there is none."""
    try:
        if "reward.json" in rewards:
            told = json.loads(rewards["reward.json"])
            values = told if isinstance(told, dict) else {"reward": told}
            number = values["reward"] if "reward" in values else values[min(values)] if len(values) == 1 else None
            return None if number is None else as_reward(number, "reward.json")
        return as_reward(float(rewards["reward.txt"]), "reward.txt") if "reward.txt" in rewards else None
    except (ValueError, KeyError, RecursionError, RewardInvalid):
        return None


def _told(ended: Ended) -> str:
    """What the model is told of its script."""
    return f"{ended.text.strip()}\n[{_how(ended)}]".strip()


def _how(ended: Ended) -> str:
    return "did not end in time" if ended.status is None else f"ended with status {ended.status}"


def _not_called(*_: Any, **__: Any) -> float:
    raise AssertionError("the task's tests give the reward")

"""Every block of code on README.md and the pages below docs/ is run, in the way that fits its kind.

Python is executed, and what it defines is used: agents play in this process and in one of their own, scripts train.
YAML is loaded as settings, commands are run where they are cheap, and are otherwise rehearsed: `areal train` as
`--dry-run`, `make` as `make -n`; `REHEARSALS` has all of them. Requests go to a real proxy. A block of which this is
not possible is in `NOT_RUN` or `NEEDS` with the reason, and is still parsed; its settings are loaded, its options and
files exist. A block that none of this knows fails.
"""

import argparse
import ast
import asyncio
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from guide_stage import TASK, guide_stage
from openai.types.chat import ChatCompletionUserMessageParam
from page_snippets import CODE, CONSOLE, DOCS, FENCE, ROOT, SHELLS, TEXT, Snippet, snippets, snippets_of
from pydantic import TypeAdapter
from readers_place import ReadersPlace, train_a_little, train_an_adapter

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.messages import Episode
from areal.cli.main import main
from areal.cli.parsers import verb_parser
from areal.cli.verbs import VERBS
from areal.config.presets import lines
from areal.config.reference import settings
from areal.engine.model_path import check_model_path
from areal.rollout.loading import WorkflowSpec, check
from areal.store.filters import parse_filter
from areal.store.writer import StoreWriter
from areal.trainer.exporter import METRICS

pytestmark = pytest.mark.timeout(600)  # the first test trains; beside other work that takes its time

NOT_RUN = {
    "command-line.md#areal-replay": "one of its commands begins at step 80 of a run",
    "datasets.md#ids-on-the-hub": "downloads from the hub",
    "deployment.md#container": "needs podman, and builds an image",
    "deployment.md#dashboard": "is Prometheus's own file",
    "deployment.md#kuberay": "needs a Kubernetes cluster",
    "deployment.md#metrics": "asks a run that trains; tests/e2e/test_metrics_page.py does",
    "deployment.md#ray": "needs a Ray cluster with GPUs",
    "deployment.md#slurm": "needs a Slurm cluster with GPUs",
    "examples.md#a-pretrained-model": "converts a model and trains it for half an hour",
    "examples.md#search-and-cite": "its model is made first, which takes minutes",
    "legacy.md#legacy-agents": "my_param is a setting of the reader's own",
    "preferences.md#a-reward-model": "needs a reward model; tests/trainer/test_preference_training.py trains one",
    "scaling.md#servers-that-run-already": "connects to a server that would have to run",
    "scaling.md#vllm-that-runs-already-2": "needs vLLM; make test-vllm starts one so",
    "trackers.md#trackers": "needs W&B; make test-trackers has it",
    "vision.md#vision": "makes a vision model first, which takes minutes",
}
"""Name -> why it cannot be run here."""
NEEDS = {
    "datasets.md#reasoning-gym": "reasoning_gym",
    "environments.md#gymnasium": "gymnasium",
    "environments.md#verifiers-2": "verifiers",
    "frameworks.md#camel-ai": "camel",
    "lora.md#what-a-run-leaves-2": "peft",
    "more-frameworks.md#autogen": "autogen_agentchat",
    "more-frameworks.md#crewai": "crewai",
    "more-frameworks.md#dspy": "dspy",
    "more-frameworks.md#google-adk": "google.adk",
    "more-frameworks.md#haystack": "haystack",
    "more-frameworks.md#instructor": "instructor",
    "more-frameworks.md#litellm": "litellm",
    "more-frameworks.md#llamaindex": "llama_index",
    "more-frameworks.md#smolagents": "smolagents",
    "more-frameworks.md#strands": "strands",
    "ranks.md#training-on-several-ranks": "accelerate",
    "tracing.md#tracing": "opentelemetry.sdk",
}
"""Name -> the library without which it is only parsed; a make target of its own installs it."""
PLAIN_PROGRAMS = {"cat", "echo", "eval", "export", "openssl", "umask", "jq", ".", "for", "do", "done"}
"""Of every machine or of the shell, and without a part of ours."""
TRANSLATED = sorted(path.name for path in (DOCS / "zh").glob("*.md"))
ALL = snippets()


def of(*kinds: str) -> list[Any]:
    return [pytest.param(each, id=each.name) for each in ALL if each.kind in kinds]


def is_run(snippet: Snippet) -> bool:
    return snippet.name not in NOT_RUN and is_installed(NEEDS.get(snippet.name, "areal"))


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it would be in
        return False


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_a_little(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_an_adapter(tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def place(
    tmp_path: Path, tiny_math: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReadersPlace]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    runs = {True: "adapter_run", False: "small_run"}  # only blocks that name one have it trained
    yield ReadersPlace(tmp_path, tiny_math, lambda name: request.getfixturevalue(runs[name.endswith("-lora")]))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


# What there is


def test_every_block_says_what_it_is() -> None:
    assert [each.name for each in ALL if each.kind not in (*CODE, TEXT)] == []


def test_what_is_not_run_is_on_a_page() -> None:
    assert sorted({*NOT_RUN, *NEEDS} - {each.name for each in ALL}) == []
    assert NOT_RUN.keys().isdisjoint(NEEDS)


LOOKS_LIKE_CODE = re.compile(
    r"^(?:\$ |areal [a-z]|make [a-z]|pip |python3? |curl |import \w|from \w+.* import |class \w|def \w)"
)


@pytest.mark.parametrize("snippet", of(TEXT))
def test_no_code_is_called_text(snippet: Snippet) -> None:
    assert [line for line in snippet.text.splitlines() if LOOKS_LIKE_CODE.match(line)] == []


# Settings


@pytest.mark.parametrize("snippet", of("yaml"))
def test_printed_settings_load(snippet: Snippet, place: ReadersPlace) -> None:
    if not is_run(snippet):
        assert yaml.safe_load(snippet.text)
        return
    file = place.directory / "printed.yaml"
    file.write_text(snippet.text, encoding="utf-8")
    load_expr_config(["--config", str(file)], GRPOConfig)


# Commands


@pytest.mark.parametrize("snippet", of(*SHELLS, CONSOLE))
def test_printed_commands_are_understood_and_run(
    snippet: Snippet, place: ReadersPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = snippet.text if snippet.kind != CONSOLE else "\n".join(typed for typed, _ in snippet.typed())
    parsed = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, timeout=30)
    assert parsed.returncode == 0, parsed.stderr
    if sequel := SHELL_SEQUELS.get(snippet.name):
        sequel(snippet, place)
        return
    monkeypatch.setattr("sys.stdin", io.StringIO("Sort 5291\n"))
    assert snippet.commands()
    for program, *words in snippet.commands():
        if program in PLAIN_PROGRAMS:
            continue
        assert program in PROGRAMS, f"nothing here checks {program}; add it to PROGRAMS"
        PROGRAMS[program](words, place, is_run(snippet))


def areal(words: list[str], place: ReadersPlace, run: bool) -> None:
    verb, *rest = words
    parsed = verb_parser(verb, VERBS[verb]).parse_words(rest)
    if "overrides" in parsed:
        demo = ["--config", str(ROOT / "areal/cli/demo.yaml")] if getattr(parsed, "demo", False) else []
        file = ["--config", parsed.config] if parsed.config and not parsed.config.startswith("runs/") else []
        load_expr_config([*demo, *file, *parsed.overrides], GRPOConfig)
    if run:
        file = getattr(parsed, "config", None)
        place.have_runs(" ".join(words) + (Path(file).read_text() if file and Path(file).is_file() else ""))
        if verb == "view":
            place.have_runs("runs/sort-digits/one")
        REHEARSALS[verb](rest, parsed)


def call(verb: str, *words: str, codes: tuple[int, ...] = (0,)) -> None:
    code = main([verb, *words])
    assert code in codes, f"areal {verb} {' '.join(words)} ended with {code}"


def rehearse_train(words: list[str], parsed: argparse.Namespace) -> None:
    """With one built-in model for all: making another takes as long as a hundred plans."""
    file = ["--config", parsed.config] if parsed.config else []
    config, _ = load_expr_config([*file, *parsed.overrides], GRPOConfig)
    model = ["actor.path=builtin:tiny-math"] if config.actor.path.startswith("builtin:") else []
    call("train", *words, *model, *(() if parsed.dry_run else ("--dry-run",)))


def rehearse_check(words: list[str], parsed: argparse.Namespace) -> None:
    call("check", *words, "--engine", "fake", "--n", "4")


def rehearse_doctor(words: list[str], parsed: argparse.Namespace) -> None:
    call("doctor", *words, codes=(0, 1))  # 1 = this machine has too little


def rehearse_eval(words: list[str], parsed: argparse.Namespace) -> None:
    for model in parsed.model:
        check_model_path(model)
    config, _ = load_expr_config(["--config", parsed.config] if parsed.config else [], GRPOConfig)
    check(WorkflowSpec(parsed.workflow or config.workflow))
    assert parsed.data is None or Path(parsed.data).is_file()


def rehearse_serve(words: list[str], parsed: argparse.Namespace) -> None:
    check_model_path(parsed.model)
    assert parsed.api_key_file is None or Path(parsed.api_key_file).is_file()


def rehearse_view(words: list[str], parsed: argparse.Namespace) -> None:
    call("view", *words, *(() if parsed.bundle else ("--bundle", "pages-of-all")))


def rehearse_simulate(words: list[str], parsed: argparse.Namespace) -> None:
    call("simulate", *words, "--steps", "2", "--batch-size", "8", *(("--gpus", "8") if parsed.gpus else ()))


def rehearse_new(words: list[str], parsed: argparse.Namespace) -> None:
    Path(f"{parsed.name}.py").unlink(missing_ok=True)  # the reader's own, if another page had them write it
    call("new", *words)


def rehearse_status(words: list[str], parsed: argparse.Namespace) -> None:
    call("status", *words, codes=(3,))


def rehearse_export(words: list[str], parsed: argparse.Namespace) -> None:
    call("export", *words, "--force")


def rehearse_rescore(words: list[str], parsed: argparse.Namespace) -> None:
    parse_filter(parsed.filter or "")  # of a run of two steps it might leave nothing
    call("rescore", parsed.run, "--reward", parsed.reward, "--force")


def as_printed(verb: str) -> Callable[[list[str], argparse.Namespace], None]:
    return lambda words, parsed: call(verb, *words)


REHEARSALS: dict[str, Callable[[list[str], argparse.Namespace], None]] = {
    "train": rehearse_train,  # as a plan
    "check": rehearse_check,  # without a model
    "doctor": rehearse_doctor,
    "eval": rehearse_eval,  # what it is given is there; tests/cli/test_eval.py runs it
    "serve": rehearse_serve,  # what it is given is there; tests/cli/test_serve.py runs it
    "view": rehearse_view,  # as pages on a disk, in place of a server
    "simulate": rehearse_simulate,  # two small steps, on few machines
    "export": rehearse_export,  # examples of one verb, each for itself: files of the one before are overwritten
    "rescore": rehearse_rescore,
    "new": rehearse_new,
    "status": rehearse_status,
    **{verb: as_printed(verb) for verb in ("chat", "completion", "config", "merge", "replay")},
}


def make(words: list[str], place: ReadersPlace, run: bool) -> None:
    planned = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert planned.returncode == 0, planned.stderr


def pip(words: list[str], place: ReadersPlace, run: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    install, *asked = words
    assert install == "install"
    for each in asked:
        named = re.fullmatch(r"(?:areal-agents|\.)\[([\w,-]+)\]", each)
        known = {re.split(r"[\[<>=]", needed)[0] for extra in extras.values() for needed in extra}
        assert set(named[1].split(",")) <= set(extras) if named else each in known


def uv(words: list[str], place: ReadersPlace, run: bool) -> None:
    match words:
        case ["pip", "install", *asked]:
            pip(["install", *(each for each in asked if not each.startswith("-"))], place, run)
        case ["pip", "compile", file, *_]:
            assert (ROOT / file).is_file()
        case _:
            assert words == ["venv"]


def python(words: list[str], place: ReadersPlace, run: bool) -> None:
    match words:
        case ["-c", program]:
            ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
            assert ended.returncode == 0, ended.stderr
        case ["-m", "pytest", *tests]:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stdout
        case ["-m", "venv", _]:
            pass
        case ["-m", module, *options]:
            assert find_spec(module) is not None
            if not options:
                return
            command = [sys.executable, "-m", module, "--help"]
            helped = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert all(f"{each} " in helped.stdout for each in options if each.startswith("--"))
        case [script, *overrides]:
            assert Path(script).is_file()
            if run:
                load_expr_config(overrides, GRPOConfig)


def curl(words: list[str], place: ReadersPlace, run: bool) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    asked = parser.parse_args(words)
    if run:
        asyncio.run(answered(asked))


async def answered(asked: argparse.Namespace) -> None:
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'
    async with guide_stage(lambda prompt: called if "tool_choice" in (asked.d or "") else "12") as stage:
        key = stage.proxy.open_session().api_key
        answer = await stage.proxy.http_client.request(
            "POST" if asked.d else "GET",
            asked.url.replace("http://127.0.0.1:8000", stage.proxy.origin),
            headers=[each.replace("$KEY", key).split(": ") for each in asked.H],
            content=asked.d,
        )
        assert answer.status_code == 200, answer.text


def podman(words: list[str], place: ReadersPlace, run: bool) -> None:
    """The image's command is `areal`, and the repository is /opt/areal there."""
    if words[0] == "build":
        assert (ROOT / words[words.index("-f") + 1]).is_file()
    else:
        inside = [word.replace("/opt/areal/", "") for word in words[words.index("areal") + 1 :]]
        areal(inside, place, run=False)


def kubectl(words: list[str], place: ReadersPlace, run: bool) -> None:
    files = [word for word in words if word.endswith(".yaml")]
    assert all(list(yaml.safe_load_all((ROOT / file).read_text())) for file in files)


def of_others(words: list[str], place: ReadersPlace, run: bool) -> None:
    """Nothing of it is known here."""
    assert not run


PROGRAMS: dict[str, Callable[[list[str], ReadersPlace, bool], None]] = {
    "areal": areal,
    "make": make,
    "pip": pip,
    "uv": uv,
    "python": python,
    "python3": python,
    "curl": curl,
    "podman": podman,
    "kubectl": kubectl,
    "ray": of_others,
    "/opt/vllm/bin/python": of_others,
}


def plan_of_a_large_model(snippet: Snippet, place: ReadersPlace) -> None:
    """With the model's configuration in place of the download; the page prints what is said."""
    place.link("DIR", ROOT / "tests/engine/model_configs/qwen2.5-7b")
    download, doctor = snippet.commands()
    assert download[0] == "hf"
    printed = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *doctor[1:]],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    assert printed.returncode == 1, printed.stderr
    (shown,) = (each for each in ALL if each.name == "sizing.md#will-it-fit-3")
    for part in shown.text.split("…\n"):
        assert part.split() in windows(printed.stdout.split(), len(part.split()))


def windows(words: list[str], length: int) -> list[list[str]]:
    return [words[start : start + length] for start in range(len(words) - length + 1)]


def session_by_curl(snippet: Snippet, place: ReadersPlace) -> None:
    asyncio.run(an_online_session(snippet))


async def an_online_session(snippet: Snippet) -> None:
    async with guide_stage(lambda prompt: "1259") as stage:
        waiting = asyncio.create_task(stage.proxy.online.offer(stage.proxy.open_session, {}))
        await asyncio.sleep(0)
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", snippet.text.replace("http://127.0.0.1:8123", stage.proxy.origin),
            env={**os.environ, "ADMIN_KEY": stage.proxy.admin_key, "NO_PROXY": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            said, _ = await shell.communicate()
        assert shell.returncode == 0
        assert b'"ended":true,"rewarded":true' in said
        assert (await waiting).session.tree.reward == 1.0


SHELL_SEQUELS: dict[str, Callable[[Snippet, ReadersPlace], None]] = {
    "online.md#online-agents-3": session_by_curl,
    "sizing.md#will-it-fit-2": plan_of_a_large_model,
}
"""What is run as a whole."""


# What is printed


def test_settings_are_found_as_the_page_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ((typed, printed),) = console("command-line.md#settings")
    main(typed.split()[1:])
    assert capsys.readouterr().out.split() == printed.split()  # how wide the terminal is does not matter


def test_plan_has_the_lines_that_the_page_prints(capsys: pytest.CaptureFixture[str], tiny_math: Path) -> None:
    ((typed, printed),) = console("command-line.md#a-plan-before-a-run")
    main(typed.split()[1:])
    said = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines() if line != "…"]
    assert [name for name in names if not re.search(rf"^{name} ", said, re.MULTILINE)] == []


def test_preset_is_told_as_the_page_prints() -> None:
    config_text, told = (named(f"algorithms.md#algorithms{number}").text for number in ("", "-2"))
    words = [f"actor.{key}={value}" for key, value in yaml.safe_load(config_text)["actor"].items()]
    assert lines(load_expr_config(words, GRPOConfig)[0].resolved) == told.splitlines()


def test_metrics_that_the_page_prints_are_exported() -> None:
    printed = set(re.findall(r"^(areal_\w+)", named("deployment.md#metrics-2").text, re.MULTILINE))
    assert printed <= METRICS.keys()


def test_readme_draws_the_packages_that_there_are() -> None:
    drawn = re.findall(r"^  (\w+)/(?:  (\w+)/)?", named("README.md#map").text, re.MULTILINE)
    there = {each.parent.name for each in (ROOT / "areal").glob("*/__init__.py")}
    assert {name for pair in drawn for name in pair if name} | {"viewer", "store"} == there


def named(name: str) -> Snippet:
    (found,) = (each for each in ALL if each.name == name)
    return found


def console(name: str) -> list[tuple[str, str]]:
    return list(named(name).typed())


# Python


@pytest.mark.parametrize("snippet", of("python"))
def test_printed_python_runs(snippet: Snippet, place: ReadersPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(snippet.text, snippet.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if not is_run(snippet):
        return
    if before := PRELUDES.get(snippet.name):
        before(place)
    monkeypatch.setattr("sys.argv", ["printed.py", *SCRIPT_WORDS.get(snippet.name, ())])
    is_script = snippet.name in SCRIPT_WORDS
    space: dict[str, Any] = {"__name__": "__main__" if is_script else "page", "trainer": Trainer()}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, space))
    else:
        exec(code, space)
    agents = [each for each in space.values() if isinstance(each, type) and each.__module__ == "page"]
    if sequel := PYTHON_SEQUELS.get(snippet.name):
        sequel(space, place)
    elif agents:
        for each in agents:
            asyncio.run(plays(each))
            is_checked(snippet, each.__name__, place)
    else:
        assert is_script or "assert " in snippet.text, "it shows nothing; add an assert, or a sequel here"


async def plays(agent: type) -> None:
    for said, reward in (("12", 1.0), ("13", 0.0)):
        async with guide_stage(lambda prompt, said=said: said) as stage:
            episode = await stage.play(agent, TASK)
            assert isinstance(episode, Episode), episode
            assert episode.reward == reward


def is_checked(snippet: Snippet, name: str, place: ReadersPlace) -> None:
    """`areal check` plays it alone, several at once and in a process, and finds nothing."""
    (place.directory / "my_printed.py").write_text(snippet.text)
    call("check", f"my_printed.{name}", "--data", "sample.jsonl", "--engine", "fake", "--n", "4")


def test_agent_of_the_readme_passes_the_check_of_the_readme(place: ReadersPlace) -> None:
    (command,) = re.findall(r"`(areal check [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    call(*command.split()[1:])


class Trainer:
    """Of a script that a page prints a line of: what it is told to train must be something that can be."""

    def train(self, workflow: str, workflow_kwargs: dict[str, Any]) -> None:
        check(WorkflowSpec(workflow, workflow_kwargs))


def computes_an_objective(space: dict[str, Any], place: ReadersPlace) -> None:
    import torch

    logprobs, log_ratio, advantages = torch.tensor([[-1.0, -2.0], [0.0, 1.0], [1.0, -1.0]])
    algorithm = load_expr_config(["actor.objective=my_module.my_objective"], GRPOConfig)[0].algorithm
    loss = space["my_objective"](logprobs, log_ratio, advantages, algorithm)
    torch.testing.assert_close(loss, torch.tensor([-1.0, 2.0]))


def has_answered(space: dict[str, Any], place: ReadersPlace) -> None:
    assert 1 <= len(space["answer"].output_tokens) <= 8


def scores_without_a_sandbox(space: dict[str, Any], place: ReadersPlace) -> None:
    tests = [{"input": "", "output": "7"}]
    assert space["unprotected"]("", "```python\nprint(7)\n```", [], [], tests=tests) == 1.0


def is_a_legacy_agent(space: dict[str, Any], place: ReadersPlace) -> None:
    """tests/realhf/test_legacy_page.py plays it."""
    from realhf.training.main_async_ppo import workflow_arguments

    config, _ = load_expr_config(["answer_tokens=3"], space["OneTryConfig"])
    assert workflow_arguments(config)["agent_args"] == {"answer_tokens": 3}


def has_the_signatures(space: dict[str, Any], place: ReadersPlace) -> None:
    for name in ("MyAgent", "MyWorkflow"):
        check(WorkflowSpec(space[name]), "areal.reward.exact_match_reward")


def has_what_the_table_names(space: dict[str, Any], place: ReadersPlace) -> None:
    section = (DOCS / "workflows.md").read_text(encoding="utf-8").partition("\n## `workflow_context`\n")[2]
    listed = re.findall(r"^\| `(?:await )?(\w+)\(\)` \|", section, re.MULTILINE)
    assert len(listed) == 4
    assert all(callable(getattr(space["workflow_context"], name)) for name in listed)


def trained(space: dict[str, Any], place: ReadersPlace) -> None:
    (summary,) = place.directory.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 2


def write_a_store(place: ReadersPlace) -> None:
    import numpy as np

    from areal.api.messages import GroupResult, Row
    from areal.store.records import StepRecord

    mask = np.array([False, True])
    row = Row(
        input_ids=np.array([1, 2], np.int32), loss_mask=mask, logprobs=-mask.astype(np.float32),
        versions=mask.astype(np.int32) - 1, returns=np.zeros(2, np.float32), completion_index=mask.astype(np.int32) - 1,
        temperatures=np.ones(2, np.float32), reward=0.0,
    )  # fmt: skip
    said = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "The parcel is lost."}]
    group = GroupResult(0, [Episode([row], 0.0, said, calls=1, seconds=1.0)], [], {})
    directory = place.directory / "runs/experiment/trial"
    directory.mkdir(parents=True)
    with StoreWriter(directory) as store:
        store.set_meta({"config": {}, "total_steps": 1})
        store.started(0, 0, {"messages": said[:1]})
        store.ready(group)
        store.step(StepRecord(1, 1, "d1", [0], {"reward": 0.0}, {}))


def write_pairs(place: ReadersPlace) -> None:
    pairs = [{"prompt": f"Sort 52{n}", "chosen": f"2{n}5", "rejected": f"52{n}"} for n in range(6, 10)]
    (place.directory / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


SMALL = ("trial_name=two", "total_train_steps=2", "train_dataset.batch_size=2")
SCRIPT_WORDS: dict[str, tuple[str, ...]] = {
    "datasets.md#supervised-training": ("train_dataset.path=builtin:sort-digits", *SMALL),
    "preferences.md#pairs-of-answers": ("train_dataset.path=pairs.jsonl", *SMALL),
}
"""Scripts, with the words that each is started with."""
PRELUDES: dict[str, Callable[[ReadersPlace], None]] = {
    "lora.md#what-a-run-leaves-2": lambda place: place.have_runs(named("lora.md#what-a-run-leaves-2").text),
    "preferences.md#pairs-of-answers": write_pairs,
    "store.md#what-to-look-for": write_a_store,
}
PYTHON_SEQUELS: dict[str, Callable[[dict[str, Any], ReadersPlace], None]] = {
    "algorithms.md#functions-of-your-own-2": computes_an_objective,
    "datasets.md#supervised-training": trained,
    "engine.md#the-embedded-engine": has_answered,
    "environments.md#verifiers-2": lambda space, place: None,
    "environments.md#tasks-2": lambda space, place: None,  # its line was checked by the trainer here
    "legacy.md#write-an-agent": is_a_legacy_agent,
    "lora.md#what-a-run-leaves-2": lambda space, place: None,
    "preferences.md#pairs-of-answers": trained,
    "rewards.md#untrusted-code-2": scores_without_a_sandbox,
    "store.md#what-to-look-for": lambda space, place: None,  # it prints what it found, of the store that was written
    "workflows.md#workflows": has_the_signatures,
    "workflows.md#workflow_context": has_what_the_table_names,
}


# JSON


@pytest.mark.parametrize("snippet", of("json", "toml"))
def test_printed_data_is_what_the_page_says(snippet: Snippet) -> None:
    assert snippet.name in DATA, "nothing here uses it; add it to DATA"
    DATA[snippet.name](json.loads(snippet.text))


def is_a_task_of_an_environment(data: dict[str, Any]) -> None:
    module, _, _ = data["env"].partition(":")
    assert find_spec(module) is not None
    assert data.keys() == {"env", "seed", "env_kwargs"}


def is_a_task_of_an_openenv_environment(data: dict[str, Any]) -> None:
    module, _, _ = data["env"].partition(":")
    assert find_spec(module) is not None
    assert data.keys() == {"env", "seed", "options"}


def is_a_message(data: dict[str, Any]) -> None:
    TypeAdapter(ChatCompletionUserMessageParam).validate_python(data)


DATA: dict[str, Callable[[dict[str, Any]], None]] = {
    "environments.md#openenv": is_a_task_of_an_openenv_environment,
    "environments.md#tasks": is_a_task_of_an_environment,
    "frameworks.md#images": is_a_message,
}


# The mechanism itself


def test_new_block_that_nothing_runs_would_fail() -> None:
    page = (
        "# A page\n\n```python\nx = 1\n```\n\n## Two\n\n```bash\nVALUE=1 unknown $(areal gone) > file && make x\n```\n"
    )
    python_block, shell_block = snippets_of("new.md", page)
    assert (python_block.name, shell_block.name) == ("new.md#a-page", "new.md#two")
    assert "assert" not in python_block.text
    assert python_block.name not in PYTHON_SEQUELS
    assert shell_block.commands() == [["areal", "gone"], ["unknown", "substituted"], ["make", "x"]]
    assert "unknown" not in PROGRAMS


# What else the pages say


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    section = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("\n## By message\n")[2]
    explained = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(explained) > 20
    known = [text for path in (ROOT / "areal").rglob("*.py") for text in texts(ast.parse(path.read_bytes()))]
    assert [each for each in explained if not any(is_said(each, text) for text in known)] == []


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module; what an f-string fills in is `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_said(message: str, text: str) -> bool:
    """`…` on the page stands for anything."""
    parts = message.split("…")
    if not all(part in text for part in parts):  # much faster than the search
        return False
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


def test_names_that_others_names_are_translated_to_are_settings() -> None:
    known = {each.name for each in settings(GRPOConfig)}
    rows = re.findall(r"^\| .* \| (.*) \|$", (DOCS / "coming-from.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)[:`]", row)}
    assert len(named) > 30
    assert sorted(name for name in named if not name.startswith("areal.") and name not in known) == []


@pytest.mark.parametrize("page", TRANSLATED)
def test_translation_has_the_headings_and_snippets_of_its_original(page: str) -> None:
    english, chinese = ((path / page).read_text(encoding="utf-8") for path in (DOCS, DOCS / "zh"))
    assert FENCE.findall(chinese) == FENCE.findall(english)
    levels = [
        [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]
        for text in (english, chinese)
    ]
    assert levels[0] == levels[1]
    assert len(re.findall(r"^\| ", chinese, re.MULTILINE)) == len(re.findall(r"^\| ", english, re.MULTILINE))


@pytest.mark.parametrize("page", TRANSLATED)
def test_chinese_paragraph_is_one_line_since_a_break_is_shown_as_a_space(page: str) -> None:
    text = FENCE.sub("", (DOCS / "zh" / page).read_text(encoding="utf-8"))
    assert re.findall(r"^[^|#<\n-].*\n[^|#<\n-].*$", text, re.MULTILINE) == []

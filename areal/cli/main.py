"""The `areal` command line: which verbs there are, what each takes, and how a program ends.

A verb's work is `run(args) -> int` in `areal/cli/VERB.py` or `areal/cli/VERB/`, imported only when the verb is called,
so that help answers at once and loads no torch. An error meant for the user ends as one line and code 2, Ctrl-C as 130;
any other exception is a bug and keeps its traceback.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ParamSpec

from areal import __version__
from areal.config.errors import ArealError

P = ParamSpec("P")

USER_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = _parse_verb(words[:1])
    args = _verb_parser(name).parse_intermixed_args(words[1:])
    return guard(_run, name, args)


def guard(main: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Call `main` and return the exit code, for `sys.exit(guard(main, sys.argv[1:]))`."""
    try:
        return main(*args, **kwargs) or 0
    except ArealError as error:
        if os.environ.get("AREAL_LOG", "").upper() == "DEBUG":
            traceback.print_exc()
        print(f"areal: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("areal: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(name: str, args: argparse.Namespace) -> int:
    if VERBS[name].imports_user_code and "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike python itself, does not look in the current directory
    code: int = import_module(f"{__package__}.{name}").run(args)
    return code


def _parse_verb(words: list[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="areal",
        description="Train language-model agents with asynchronous reinforcement learning.",
        epilog="verbs:\n" + "\n".join(f"  {name:<10}{verb.summary}" for name, verb in VERBS.items())
        + "\n\nareal VERB --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"areal {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs below")
    name: str = parser.parse_args(words).verb
    return name


def _verb_parser(name: str) -> argparse.ArgumentParser:
    verb = VERBS[name]
    parser = argparse.ArgumentParser(
        prog=f"areal {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=f"example: {verb.example}",
    )
    verb.declare(parser)
    return parser


def _declare_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="a setting, which overrides the file's"
    )


def _declare_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a saved model: the path that training printed at the end")


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="builtin:tiny-math", help="a saved model, builtin:NAME or a hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback it needs a key")
    parser.add_argument("--port", type=int, default=8000, help="0 = a free one")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key", metavar="KEY", help="what clients must send; by default one is made and printed")
    keys.add_argument("--api-key-file", metavar="FILE", help="a file with that key (or set AREAL_API_KEY)")
    parser.add_argument("--public-url", metavar="URL", default="", help="where clients reach it, if under another name")
    parser.add_argument(
        "--kernel", choices=("auto", "native", "torch"), default="auto", help="what computes, as rollout.kernel (auto)"
    )


def _declare_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--latency", required=True, metavar="TRACE", help="a run's directory, a trace file, or lognormal:mean=0.5"
    )
    parser.add_argument("--eta", type=int, nargs="+", help="rollout.max_head_offpolicyness (0 1 2 4; with --gpus 4)")
    parser.add_argument(
        "--when-stale", choices=("wait", "drop", "train"), default="wait", help="rollout.when_stale (wait)"
    )
    for name, default, what in (
        ("engines", 1, "inference engines"),
        ("trainers", 1, "data-parallel trainers"),
        ("workers", 1, "rollout worker processes"),
        ("batch-size", 32, "groups per step"),
        ("n-samples", 8, "episodes per group"),
        ("max-concurrent-rollouts", 256, "episodes running at once"),
        ("steps", 50, "training steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    parser.add_argument("--machines", metavar="FILE", help="a model and the GPUs and hosts that it is trained on")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--ranks", metavar="fsdp:dNtM", help="who trains, on --machines; --engines generate")
    sizes.add_argument("--gpus", type=int, nargs="+", metavar="N", help="so many of --machines, divided for the model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other figures than in --machines")
    parser.add_argument("--compare", nargs="+", default=[], metavar="KEY=VALUE", help="the same again with these")
    parser.add_argument("--cores", type=float, help="everything shares one machine with this many cores")
    parser.add_argument("--save", metavar="FILE", help="write the trace to a file, to edit it")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures over eta, or over sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _declare_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("workflow", "agent"), help="an episode in tokens, or over HTTP")
    parser.add_argument("name", metavar="NAME", help="the name of its module: lowercase letters, digits and _")
    parser.add_argument(
        "--into", metavar="DIR", help="the package to write to; by default areal/workflow in a checkout, else here"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def _declare_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workflow", metavar="WORKFLOW", help="import string of a workflow or an agent: my_module.MyAgent"
    )
    parser.add_argument("arguments", nargs="*", default=[], metavar="NAME=VALUE", help="an argument of the constructor")
    parser.add_argument(
        "--data",
        default="builtin:sort-digits",
        metavar="TASKS",
        help="a .jsonl or .parquet file, a directory of them, or builtin:NAME (default: builtin:sort-digits)",
    )
    parser.add_argument(
        "--engine",
        choices=("builtin", "fake"),
        default="builtin",
        help="what answers: a small model, or random tokens (default: builtin)",
    )
    parser.add_argument(
        "--mode",
        choices=("any", "inline", "subproc"),
        default="any",
        help="where an agent runs: inline = in this process, subproc = in others, any = both in turn (default: any)",
    )
    parser.add_argument("--n", type=int, default=32, help="episodes at once (32)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each episode (60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _declare_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run: also check what it needs, and its memory")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="a setting, which overrides the file's"
    )
    parser.add_argument("--model", metavar="DIR", help="a model in place of actor.path; a config.json is enough")
    parser.add_argument(
        "--gpu-memory-gb", type=float, metavar="N", help="plan for GPUs of this size (default: those here)"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="of each host (default: those here, or 1)")
    parser.add_argument("--host-memory-gb", type=float, metavar="N", help="of each host (default: what is here)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of a task (1024)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _declare_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's directory; the run may still go on")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of both files (jsonl)")
    parser.add_argument("--out", metavar="DIR", help="where episodes and metrics are written (RUN/export)")
    parser.add_argument("--steps", metavar="A-B", help="only of these steps: 300-500, 300.. or ..500")
    parser.add_argument(
        "--filter",
        default="",
        metavar="WORDS",
        help="only episodes for which all words hold: 'reward<0.5 tokens>200 state:trained \"some text\"'",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def _declare_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", default=["runs"], metavar="RUNS", help="runs, or directories of runs (runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback it needs a token")
    parser.add_argument("--port", type=int, default=8265, help="0 = a free one (8265)")
    parser.add_argument("--bundle", metavar="DIR", help="write pages that open from a disk instead, and end")
    parser.add_argument(
        "--filter", default="", metavar="WORDS", help="episodes that a bundle has, as for areal export (the newest)"
    )
    parser.add_argument("--episodes", type=int, default=500, metavar="N", help="of each run in a bundle, at most (500)")


def _declare_rescore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's directory; the run may still go on")
    parser.add_argument("--reward", required=True, metavar="FUNCTION", help="import string: my_module.my_reward")
    parser.add_argument("--filter", default="", metavar="WORDS", help="only these episodes, as for areal export")
    parser.add_argument("--name", help="of RUN/rescored/NAME.json (the function's)")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="for each call (15)")
    parser.add_argument("--force", action="store_true", help="overwrite a result of that name")


def _declare_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's directory: output_dir/experiment_name/trial_name")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.epilog = (
        f"{parser.epilog} -- exit code: 0 = it runs, 3 = it is finished, 4 = it was stopped or killed and can go on, "
        "5 = its driver gives no answer"
    )


def _declare_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, which has a run.db")
    parser.add_argument(
        "--from", dest="start", type=int, metavar="STEP", help="begin from the checkpoint of that step (the start)"
    )
    parser.add_argument("--until-divergence", action="store_true", help="stop at the first step that differs")
    parser.add_argument("--threads", type=int, metavar="N", help="compute with so many (as many as the run)")
    parser.add_argument("--regenerate", action="store_true", help="also sample everything again; only with η = 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


@dataclass(frozen=True)
class Verb:
    summary: str
    declare: Callable[[argparse.ArgumentParser], None]
    """Adds the verb's arguments to its parser."""
    example: str
    imports_user_code: bool = False


VERBS = {
    "train": Verb(
        "train an agent's model",
        _declare_train,
        "areal train --config examples/agent_workflow/config.yaml seed=2",
        imports_user_code=True,
    ),
    "status": Verb(
        "say what each part of a run does or waits for",
        _declare_status,
        "areal status runs/sort-digits/one",
    ),
    "view": Verb(
        "show runs in a browser: curves, episodes, tokens",
        _declare_view,
        "areal view runs",
    ),
    "rescore": Verb(
        "score a run's episodes with another reward function",
        _declare_rescore,
        "areal rescore runs/sort-digits/one --reward my_module.my_reward --filter 'step:100..'",
        imports_user_code=True,
    ),
    "replay": Verb(
        "train again from stored batches, and compare the weights",
        _declare_replay,
        "areal replay runs/sort-digits/one --until-divergence",
        imports_user_code=True,
    ),
    "serve": Verb(
        "serve a model to OpenAI- or Anthropic-compatible clients",
        _declare_serve,
        "areal serve --model builtin:tiny-math --port 8000 --api-key KEY",
    ),
    "simulate": Verb(
        "predict speed, idle time and staleness on machines you do not have",
        _declare_simulate,
        "areal simulate --machines examples/simulation/h100-7b.yaml --gpus 8 64 --latency lognormal:mean=5,tokens=3000",
    ),
    "new": Verb("write a workflow or an agent to start from", _declare_new, "areal new agent my_search"),
    "check": Verb(
        "find what would go wrong with a workflow or an agent in training",
        _declare_check,
        "areal check my_module.MyAgent --data sample.jsonl",
        imports_user_code=True,
    ),
    "doctor": Verb(
        "check this machine, and whether a run's memory will fit",
        _declare_doctor,
        "areal doctor --config run.yaml actor.path=DIR --gpu-memory-gb 80 --gpus-per-node 8",
    ),
    "export": Verb(
        "write a run's episodes, tokens and metrics to files",
        _declare_export,
        "areal export runs/experiment/trial --format parquet --steps 300-500 --filter 'reward<0.5 state:trained'",
    ),
    "chat": Verb("talk to a saved model in the terminal", _declare_chat, "areal chat DIR"),
}


if __name__ == "__main__":
    sys.exit(main())

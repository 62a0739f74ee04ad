"""The verbs of the `areal` command: what each takes, with examples. A verb's work is in its own file, `areal/cli/VERB`.

One word means one thing everywhere: `--config FILE KEY=VALUE …` are a run's settings, `--model` a model, `--data`
tasks, `--filter` episodes of a run, `--json` one JSON object on stdout and nothing else there, `--force` overwrites.
What stands in parentheses at the end of a help text is the default.
"""

import argparse

from areal.cli.parsers import Verb, port

MODEL = "the directory of a model or of a run, builtin:NAME or a hub id"
TASKS = (
    "a .jsonl or .parquet file, a directory of them, a hub id, reasoning-gym:NAME, verifiers:ID, harbor:DIRECTORY or "
    "builtin:NAME"
)
FILTER = "only episodes for which all words hold: 'reward<0.5 tokens>200 state:trained \"some text\"'"


def _add_settings(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with {what}")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="a setting, which overrides the file's"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's directory, output_dir/experiment_name/trial_name")


def _declare_train(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, "the settings")
    parser.add_argument("--demo", action="store_true", help="in place of a file: a small model learns to sort digits")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print one JSON object, and nothing else")
    parser.add_argument("--quiet", action="store_true", help="print only warnings, errors and the result (quiet=true)")


def _declare_eval(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, "settings, for what is not said here (gconfig, rollout, reward_fn)")
    parser.add_argument(
        "--model", action="append", metavar="MODEL", help=f"{MODEL}; several are compared with the first (actor.path)"
    )
    parser.add_argument("--workflow", metavar="WORKFLOW", help="import string: my_module.MyAgent (workflow)")
    parser.add_argument("--data", metavar="TASKS", help=f"{TASKS} (valid_dataset)")
    parser.add_argument("--split", metavar="NAME", help="of such a directory or built-in task (test)")
    parser.add_argument("--size", type=int, metavar="N", help="only so many tasks (all)")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--greedy", action="store_true", help="the likeliest token each time, once for each task")
    ways.add_argument("--n-samples", type=int, metavar="N", help="episodes per task, for pass@k (evaluator.n_samples)")
    _add_json(parser)


def _declare_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)


def _declare_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="DIR", help="an adapter: a checkpoint of a run with actor.lora, or PEFT's")
    parser.add_argument("merged", metavar="OUT", help="a new directory for the model")


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="builtin:tiny-math", metavar="MODEL", help=f"{MODEL} (builtin:tiny-math)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback it needs a key")
    parser.add_argument("--port", type=port, default=8000, help="0 = a free one (8000)")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key", metavar="KEY", help="what clients must send; by default one is made and printed")
    keys.add_argument("--api-key-file", metavar="FILE", help="a file with that key (or set AREAL_API_KEY)")
    parser.add_argument("--public-url", metavar="URL", default="", help="where clients reach it, if under another name")
    parser.add_argument("--strict-model", action="store_true", help="answer calls that name another model with 404")
    parser.add_argument(
        "--cors-origin", nargs="+", default=[], metavar="ORIGIN", help="pages of these may call it: https://example.org"
    )
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
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--machines", metavar="FILE", help="a model and the GPUs and hosts that it is trained on")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--ranks", metavar="fsdp:dNtM", help="who trains, on --machines; --engines generate")
    sizes.add_argument("--gpus", type=int, nargs="+", metavar="N", help="so many of --machines, divided for the model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other figures than in --machines")
    parser.add_argument("--compare", nargs="+", default=[], metavar="KEY=VALUE", help="the same again with these")
    parser.add_argument("--cores", type=float, help="everything shares one machine with this many cores")
    parser.add_argument("--save", metavar="FILE", help="write the trace to a file, to edit it")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures over eta, or over sizes")
    _add_json(parser)


def _declare_new(parser: argparse.ArgumentParser) -> None:
    kinds = ("workflow", "agent")
    parser.add_argument("kind", nargs="?", choices=kinds, help="an episode in tokens, or over HTTP")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the name of its module: lowercase letters, digits and _"
    )
    parser.add_argument(
        "--example",
        nargs="?",
        const="",
        metavar="NAME",
        help="in place of both: copy an example, with its config, scripts and README; without NAME, list them",
    )
    parser.add_argument(
        "--into",
        metavar="DIR",
        help="the package to write to; by default areal/workflow in a checkout, else here. Of an example: what gets "
        "examples/NAME (here)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def _declare_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workflow", metavar="WORKFLOW", help="import string of a workflow or an agent: my_module.MyAgent"
    )
    parser.add_argument("arguments", nargs="*", default=[], metavar="NAME=VALUE", help="an argument of the constructor")
    parser.add_argument("--data", default="builtin:sort-digits", metavar="TASKS", help=f"{TASKS} (builtin:sort-digits)")
    parser.add_argument(
        "--engine",
        choices=("builtin", "fake"),
        default="builtin",
        help="what answers: a small model, or random tokens (builtin)",
    )
    parser.add_argument(
        "--mode",
        choices=("any", "inline", "subproc"),
        default="any",
        help="where an agent runs: inline = in this process, subproc = in others, any = both in turn (any)",
    )
    parser.add_argument("--episodes", "--n", dest="n", type=int, default=32, metavar="N", help="at once (32)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each episode (60)")
    _add_json(parser)


def _declare_doctor(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, "the settings of a run: also check what it needs, and its memory")
    parser.add_argument("--model", metavar="MODEL", help="in place of actor.path; a config.json is enough")
    parser.add_argument("--gpu-memory-gb", type=float, metavar="N", help="plan for GPUs of this size (those here)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="of each host (those here, or 1)")
    parser.add_argument("--host-memory-gb", type=float, metavar="N", help="of each host (what is here)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of a task (1024)")
    _add_json(parser)


def _declare_export(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of both files (jsonl)")
    parser.add_argument("--out", metavar="DIR", help="where episodes and metrics are written (RUN/export)")
    parser.add_argument("--steps", metavar="A-B", help="only of these steps: 300-500, 300.. or ..500")
    parser.add_argument("--filter", default="", metavar="WORDS", help=FILTER)
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    _add_json(parser)


def _declare_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", default=["runs"], metavar="RUNS", help="runs, or directories of runs (runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback it needs a token")
    parser.add_argument("--port", type=port, default=8265, help="0 = a free one (8265)")
    parser.add_argument("--bundle", metavar="DIR", help="write pages that open from a disk instead, and end")
    parser.add_argument("--filter", default="", metavar="WORDS", help=f"for --bundle: {FILTER} (the newest)")
    parser.add_argument("--episodes", type=int, default=500, metavar="N", help="of each run in a bundle, at most (500)")


def _declare_rescore(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--reward", required=True, metavar="FUNCTION", help="import string: my_module.my_reward")
    parser.add_argument("--filter", default="", metavar="WORDS", help=FILTER)
    parser.add_argument("--name", help="of RUN/rescored/NAME.json (the function's)")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="for each call (15)")
    parser.add_argument("--force", action="store_true", help="overwrite a result of that name")
    _add_json(parser)


def _declare_status(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    _add_json(parser)


def _declare_replay(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--from", dest="start", type=int, metavar="STEP", help="begin from the checkpoint of that step (the start)"
    )
    parser.add_argument("--until-divergence", action="store_true", help="stop at the first step that differs")
    parser.add_argument("--threads", type=int, metavar="N", help="compute with so many (as many as the run)")
    parser.add_argument("--regenerate", action="store_true", help="also sample everything again; only with η = 0")
    _add_json(parser)


def _declare_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="*", metavar="WORD", help="only settings in which all words occur (all)")
    parser.add_argument("--sft", action="store_true", help="those of supervised fine-tuning instead")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    ways.add_argument("--json-schema", action="store_true", help="print a JSON schema of a YAML file, for editors")


def _declare_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


VERBS = {
    "train": Verb(
        "train an agent's model",
        _declare_train,
        {
            "areal train --demo": "a small model learns to sort digits, on two CPU cores, with nothing to download",
            "areal train --config run.yaml trial_name=one seed=2": "a run of your own, or the rest of it",
            "areal train --config run.yaml --dry-run": "what would be started, and whether it fits",
        },
        imports_user_code=True,
    ),
    "eval": Verb(
        "measure models on held-out tasks, side by side",
        _declare_eval,
        {
            "areal eval --config runs/digits/one/config.yaml --model builtin:tiny-math --model runs/digits/one": (
                "what a run made of its model, on the run's own held-out tasks"
            ),
            "areal eval --model builtin:tiny-math --model DIR --workflow my_module.MyAgent --data test.jsonl": (
                "two models on the same tasks, with the difference and its interval"
            ),
            "areal eval --model DIR --workflow my_module.MyAgent --data test.jsonl --n-samples 8 --json": (
                "pass@1 to pass@8, for a script"
            ),
        },
        imports_user_code=True,
    ),
    "status": Verb(
        "say what each part of a run does or waits for",
        _declare_status,
        {
            "areal status runs/sort-digits/one": "why is nothing happening?",
            "areal status runs/sort-digits/one --json | jq .state": "for a script",
        },
        {0: "it runs", 3: "it is finished", 4: "it was stopped, failed or killed", 5: "its driver gives no answer"},
    ),
    "view": Verb(
        "show runs in a browser: curves, episodes, tokens",
        _declare_view,
        {
            "areal view": "all runs below runs/",
            "areal view runs/sort-digits/one --port 0": "one run, at a free port",
            "areal view runs/sort-digits --bundle pages --filter 'reward<0.5'": "pages that open from a disk",
        },
    ),
    "export": Verb(
        "write a run's episodes, tokens and metrics to files",
        _declare_export,
        {
            "areal export runs/sort-digits/one": "everything, as JSON lines",
            "areal export runs/sort-digits/one --format parquet --steps 300-500 --filter 'reward<0.5 state:trained'": (
                "what was trained with little reward late in the run"
            ),
        },
    ),
    "rescore": Verb(
        "score a run's episodes with another reward function",
        _declare_rescore,
        {
            "areal rescore runs/sort-digits/one --reward my_module.my_reward": "all episodes",
            "areal rescore runs/sort-digits/one --reward my_module.my_reward --filter 'step:100..' --name later": (
                "the later ones, beside the result of all"
            ),
        },
        imports_user_code=True,
    ),
    "replay": Verb(
        "train again from stored batches, and compare the weights",
        _declare_replay,
        {
            "areal replay runs/sort-digits/one --until-divergence": "up to the first step that differs",
            "areal replay runs/sort-digits/one --from 80 --json": "from a checkpoint on, for a script",
        },
        {0: "the weights of every step are the same", 1: "a step differs"},
        imports_user_code=True,
    ),
    "chat": Verb(
        "talk to a model in the terminal",
        _declare_chat,
        {
            "areal chat runs/sort-digits/one": "with the newest model of a run",
            "echo 'Sort 3142' | areal chat builtin:tiny-math": "one line in, one line out",
        },
    ),
    "merge": Verb(
        "make an ordinary model of an adapter and its model",
        _declare_merge,
        {"areal merge runs/sort-digits-lora/one/checkpoints/step-000160 merged": "a directory that anything loads"},
    ),
    "serve": Verb(
        "serve a model to OpenAI- or Anthropic-compatible clients",
        _declare_serve,
        {
            "areal serve --model builtin:tiny-math": "on this machine, with a key that is made and printed",
            "areal serve --model DIR --host 0.0.0.0 --port 8000 --api-key-file key.txt": "for other machines",
        },
    ),
    "new": Verb(
        "write a workflow or an agent to start from, or copy an example",
        _declare_new,
        {
            "areal new agent my_search": "an agent on the OpenAI SDK, with its test",
            "areal new workflow my_search --into my_package": "an episode in tokens, in a package",
            "areal new --example": "which examples there are",
            "areal new --example countdown": "one of them, to run and to change: examples/countdown",
        },
    ),
    "check": Verb(
        "find what would go wrong with a workflow or an agent in training",
        _declare_check,
        {
            "areal check my_module.MyAgent --data sample.jsonl": "on tasks of your own",
            "areal check my_module.MyWorkflow reward_fn=my_module.my_reward --engine fake": "without a model",
        },
        {0: "nothing was found", 1: "something was"},
        imports_user_code=True,
    ),
    "doctor": Verb(
        "check this machine, and whether a run's memory will fit",
        _declare_doctor,
        {
            "areal doctor": "this machine",
            "areal doctor --config run.yaml actor.path=DIR --gpu-memory-gb 80 --gpus-per-node 8": (
                "a run, on machines that are not here"
            ),
        },
        {0: "nothing is missing, and it fits", 1: "something is missing, or it does not fit"},
    ),
    "simulate": Verb(
        "predict speed, idle time and staleness on machines you do not have",
        _declare_simulate,
        {
            "areal simulate --latency runs/sort-digits/one --eta 0 2 4": "a run that was, with other staleness",
            "areal simulate --machines h100-7b.yaml --gpus 8 64 --latency lognormal:mean=5,tokens=3000": (
                "a large model on 8 and on 64 GPUs"
            ),
        },
    ),
    "config": Verb(
        "list the settings: default, type, unit and meaning",
        _declare_config,
        {
            "areal config": "all of them",
            "areal config timeout": "those about timeouts",
            "areal config --json-schema > schema.json": (
                "for editors; a file that begins with '# yaml-language-server: $schema=schema.json' uses it"
            ),
        },
    ),
    "completion": Verb(
        "print a script with which a shell completes words of areal",
        _declare_completion,
        {
            'eval "$(areal completion bash)"': "in this shell; in ~/.bashrc, in all (zsh: in ~/.zshrc, after compinit)",
            "areal completion fish > ~/.config/fish/completions/areal.fish": "in every fish",
        },
    ),
}

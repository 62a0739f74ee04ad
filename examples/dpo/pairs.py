"""Pairs of answers that the built-in model gave itself: `python3 examples/dpo/pairs.py runs/pairs`.

It answers each question of builtin:sort-digits several times. A right answer makes a pair with each wrong one, in
train.jsonl or, of held-out questions, in test.jsonl. `--measure MODEL` says how often a model is right.
"""

import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from areal.api.cli_args import DatasetConfig, GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.cli.main import guard
from areal.dataset import get_custom_dataset
from areal.engine.inference.server import load_engine
from areal.engine.models import find_model
from areal.trajectory.rendering import Renderer
from areal.utils.hf_utils import load_hf_tokenizer

MODEL = "builtin:tiny-math"
SAMPLES = 8
"""Answers to each question."""


def tasks_of(split: str, size: int) -> list[dict[str, Any]]:
    return get_custom_dataset(split, DatasetConfig(path="builtin:sort-digits", size=size))


async def answers(model: str, tasks: list[dict[str, Any]], samples: int, *, greedy: bool = False) -> list[list[str]]:
    """What a model answers to each task."""
    directory = find_model(model, print)
    engine, tokenizer = load_engine(directory), load_hf_tokenizer(directory)
    renderer = Renderer(tokenizer)
    settings = GenerationHyperparameters(greedy=greedy, max_new_tokens=48)
    settings = settings.new(stop_token_ids=list(renderer.turn_end_ids))

    async def answer(task: dict[str, Any]) -> str:
        ids = renderer.encode(renderer.render(task["messages"], None))
        response = await engine.agenerate(ModelRequest(uuid.uuid4().hex, ids, settings, tokenizer))
        return str(tokenizer.decode(response.output_tokens, skip_special_tokens=True)).strip()

    try:
        flat = await asyncio.gather(*(answer(task) for task in tasks for _ in range(samples)))
    finally:
        await engine.aclose()
    return [list(flat[at : at + samples]) for at in range(0, len(flat), samples)]


def pairs(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for task, given in zip(tasks, asyncio.run(answers(MODEL, tasks, SAMPLES)), strict=True):
        wrong = dict.fromkeys(each for each in given if each != task["answer"])
        if task["answer"] in given:
            made += [{"prompt": task["messages"], "chosen": task["answer"], "rejected": each} for each in wrong]
    return made


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default="runs/pairs")
    parser.add_argument("--measure", metavar="MODEL")
    args = parser.parse_args(argv)
    held_out = tasks_of("test", 512)
    if args.measure:
        for greedy in (False, True):
            given = asyncio.run(answers(args.measure, held_out, 1, greedy=greedy))
            right = sum(each == task["answer"] for (each,), task in zip(given, held_out, strict=True))
            print(f"{'greedy ' if greedy else 'sampled'}  {right / len(held_out):.3f} of {len(held_out)} are right")
        return
    target = Path(args.directory)
    target.mkdir(parents=True, exist_ok=True)
    training = tasks_of("train", 2048)
    for name, tasks in (("train", training), ("test", held_out)):
        made = pairs(tasks)
        (target / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in made), encoding="utf-8")
        print(f"{len(made)} pairs in {target / name}.jsonl")


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))

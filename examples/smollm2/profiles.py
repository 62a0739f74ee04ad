"""Sentences about people, to be answered with a JSON object: `python3 examples/smollm2/profiles.py` writes the tasks.

`Emma is 34 years old and lives in Oslo.` → `{"name": "Emma", "age": 34, "city": "Oslo"}`. Held-out sentences are about
people of other names.
"""

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from areal.cli.main import guard

PLACE = Path("runs/smollm2-tasks")
SHOWN = [
    {"role": "system", "content": "Reply in JSON."},
    {"role": "user", "content": "Ann from Bonn is 30."},
    {"role": "assistant", "content": '{"name": "Ann", "age": 30, "city": "Bonn"}'},
]
"""What every conversation begins with."""
NAMES = """
Alice Anna Arthur Bella Carl Clara Daniel David Diana Edward Elena Emily Emma Felix Frank George Grace Hannah Helen
Henry Igor Jack James Jane Julia Karen Laura Leo Linda Lucas Maria Mark Martin Nora Oliver Oscar Paul Peter Rachel
Robert Rosa Sam Sarah Simon Sofia Thomas Victor William
"""
CITIES = """
Athens Berlin Boston Cairo Chicago Dallas Delhi Denver Dublin Geneva Houston Lima Lisbon London Madrid Miami Milan
Moscow Mumbai Oslo Paris Prague Rome Seattle Sydney Tokyo Toronto Vienna Warsaw Zurich
"""
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, moved to {city}.",
    "{name} from {city} is {age}.",
    "In {city} I met {name}, who is {age} years old.",
)
SIZES = {"train": 512, "test": 128}
HELD_OUT_PERCENT = 25
SEED = 11


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % 100 < HELD_OUT_PERCENT


def tasks(split: str) -> list[dict[str, Any]]:
    """Of "train" or "test", always the same."""
    draw = random.Random(f"{SEED} {split}")
    names = [name for name in NAMES.split() if is_held_out(name) == (split == "test")]
    return [_task(draw, names) for _ in range(SIZES[split])]


def _task(draw: random.Random, names: list[str]) -> dict[str, Any]:
    profile = {"name": draw.choice(names), "age": draw.randint(11, 89), "city": draw.choice(CITIES.split())}
    sentence = draw.choice(SENTENCES).format(**profile)
    return {
        "messages": [*SHOWN, {"role": "user", "content": sentence}],
        "profile": profile,
        "answer": json.dumps(profile),
    }


def profile_reward(
    prompt: Any, completion: str, prompt_ids: list[int], completion_ids: list[int], profile: dict[str, Any], **_: Any
) -> float:
    """1 if the completion is one JSON object with exactly these keys and values, whatever its order and spaces."""
    try:
        given = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    # As text too: to Python 34.0 and True are the numbers 34 and 1.
    return float(json.dumps(given, sort_keys=True) == json.dumps(profile, sort_keys=True))


def main(argv: list[str]) -> None:
    place = Path(argv[0]) if argv else PLACE
    place.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        lines = [json.dumps(task) + "\n" for task in tasks(split)]
        (place / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{len(lines)} tasks in {place / split}.jsonl")


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))

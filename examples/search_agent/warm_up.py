"""Make what the run begins with: `python3 -m examples.search_agent.warm_up`.

Writes the tasks, makes a model of half a million parameters with a tokenizer of its own, and teaches it by supervised
training: first to copy, in exercises of a line, then how a search looks, on questions of the training split only.
It has then begun to search, and no more. Settings may follow as in other examples.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal import SFTTrainer
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.cli.main import guard
from examples.search_agent.agent import TOOLS, SearchIndex, shown
from examples.search_agent.corpus import CITIES, FIRST, HOBBIES, LAST, Question, documents, questions

PLACE = Path("runs/search-agent-warm-up")
TASKS, UNTRAINED = PLACE / "tasks", PLACE / "untrained"
SETTINGS = [
    f"experiment_name={PLACE.name}",
    "actor.optimizer.lr=3e-3",
    "actor.optimizer.beta2=0.95",
    "actor.optimizer.warmup_steps=50",
    "saver.freq_steps=50",
]
EXERCISES = ["total_train_steps=150", "train_dataset.batch_size=64"]
LESSONS = ["total_train_steps=120", "train_dataset.batch_size=32"]
VOCABULARY = 800
"""At most: so large that first and last names, cities and hobbies are a token each."""
POSITIONS = 1024


def write_tasks() -> None:
    TASKS.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = [json.dumps(question.as_task()) + "\n" for question in questions(split)]
        (TASKS / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def lessons() -> list[dict[str, Any]]:
    """The questions of training, each searched and answered."""
    index = SearchIndex(documents())
    return [{"messages": _conversation(question, index), "tools": TOOLS} for question in questions("train")]


def exercises(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Short ones in which almost every word of the answer is one of the question, about a world that does not exist.

    In a whole conversation the word to copy is one of 150, and a new model takes long to find out that copying helps.
    """
    draw = random.Random(seed)
    for _ in range(count):
        name, other = (f"{draw.choice(FIRST)}-{draw.choice(LAST)}" for _ in range(2))
        number, city, hobby = draw.randrange(100, 1000), draw.choice(CITIES), draw.choice(HOBBIES)
        asked, answer = draw.choice(
            [
                (f"[{number}] {name} lives in {city}", f"{city} [{number}]"),
                (f"[{number}] {name} likes {hobby}", f"{hobby} [{number}]"),
                (f"[{number}] {name} works for {other}", f"{other} [{number}]"),
                (f"Where does {name} live?", f"lives {name}"),
                (f"What does {name} like?", f"likes {name}"),
                (f"What does the boss of {name} like?", f"works {name}"),
            ]
        )
        yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _conversation(question: Question, index: SearchIndex) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = list(question.as_task()["messages"])
    for query in question.searches:
        call = {"name": "search", "arguments": json.dumps({"query": query})}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": shown(index.search(query))})
    cited = " ".join([question.answer, *(f"[{number}]" for number in question.evidence)])
    return [*messages, {"role": "assistant", "content": cited}]


def write_untrained(examples: list[dict[str, Any]]) -> None:
    """A tokenizer for such conversations, and a model with random weights."""
    import torch

    from areal.config.training import OptimizerConfig
    from areal.engine.builtin.tokenizer import CHAT_TEMPLATE, make_tokenizer
    from areal.engine.model.architecture import Architecture
    from areal.engine.model.decoder import initialise
    from areal.engine.training.engine import TrainingEngine

    blank = make_tokenizer([CHAT_TEMPLATE], 300, POSITIONS)
    texts = [blank.apply_chat_template(each["messages"], tools=TOOLS, tokenize=False) for each in examples]
    tokenizer = make_tokenizer(texts, VOCABULARY, POSITIONS)
    architecture = Architecture(
        family="qwen3",
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_positions=POSITIONS,
        tied_embeddings=True,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    engine = TrainingEngine(architecture, OptimizerConfig(), total_steps=1)
    initialise(engine.decoder, torch.Generator().manual_seed(20))
    engine.save(str(UNTRAINED))
    tokenizer.save_pretrained(UNTRAINED)


def teach(name: str, model: Path, examples: list[dict[str, Any]], settings: list[str]) -> Path:
    """The run of that name, which begins with `model`; one that is finished is left as it is."""
    run = PLACE / name
    if not (run / "summary.json").exists():
        config, _ = load_expr_config([*SETTINGS, *settings, f"trial_name={name}", f"actor.path={model}"], SFTConfig)
        with SFTTrainer(config, train_dataset=examples) as trainer:
            trainer.train()
    return run


def main(argv: list[str]) -> None:
    write_tasks()
    conversations = lessons()
    if not (UNTRAINED / "config.json").exists():
        write_untrained(conversations)
    copying = teach("exercises", UNTRAINED, list(exercises(10_000)), [*EXERCISES, *argv])
    teach("one", copying, conversations, [*LESSONS, *argv])


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))

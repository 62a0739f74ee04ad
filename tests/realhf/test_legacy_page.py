"""What docs/legacy.md shows is run, and what it lists is what there is."""

from pathlib import Path
from typing import Any

from legacy_stage import accepted, play, saying

import realhf
from areal.config.loader import load_expr_config
from realhf.training.main_async_ppo import workflow_arguments
from realhf.trajectories import IGNORED, PER_SEQUENCE, PER_TOKEN

PAGE = (Path(realhf.__file__).parents[1] / "docs/legacy.md").read_text()


async def test_agent_of_the_page_runs_as_it_is_printed() -> None:
    shown: dict[str, Any] = {"__name__": "page"}
    exec(PAGE.split("```python\n")[1].split("```")[0], shown)
    config, _ = load_expr_config(["answer_tokens=3"], shown["OneTryConfig"])
    named = workflow_arguments(config)
    episode = accepted(await play(named["agent"], saying("1259"), named["env"], **named["agent_args"]))
    assert [row.truncated for row in episode.rows] == [True]
    assert episode.messages[-1]["content"] == "125"


def test_page_lists_every_key_of_a_sample() -> None:
    table = PAGE.split("## What a SequenceSample may hold")[1].split("## ")[0]
    assert [key for key in (*PER_TOKEN, *PER_SEQUENCE, *IGNORED) if f"`{key}`" not in table] == []

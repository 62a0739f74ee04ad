"""The agents printed in examples/agent_workflow/README.md run as they are printed."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "examples/agent_workflow/README.md"


def printed(name: str) -> Any:
    """The object of that name in the block of the README that defines it."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    space: dict[str, Any] = {"__name__": "printed"}
    exec(next(block for block in blocks if re.search(rf"(class|def) {name}\b", block)), space)
    return space[name]


async def test_printed_agent_class_is_rewarded_for_the_right_answer(stage: Any) -> None:
    task = {"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}
    for said, reward in (("1259", 1.0), ("5291", 0.0)):
        async with stage(lambda prompt, said=said: said) as s:
            assert await printed("MyAgent")().run(task, **s.kwargs()) == reward
            assert len(s.session.tree.completions) == 1


async def test_printed_agent_function_poses_the_task_itself(stage: Any) -> None:
    async with stage(lambda prompt: "1259") as s:
        given = {name: s.kwargs()[name] for name in ("base_url", "api_key", "http_client")}
        assert await printed("sorter")({"digits": "5291", "answer": "1259"}, **given) == 1.0
        assert "Sort 5291" in s.speaker.prompts[0]

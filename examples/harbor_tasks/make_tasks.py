"""Write Harbor tasks that a small model can learn: `python examples/harbor_tasks/make_tasks.py DIRECTORY`.

Each is a directory of its own: sort the digits of a number, and leave the result in a file. Those of `train` and
`test` have no number in common.
"""

import random
import sys
from pathlib import Path

TASK = """\
version = "1.0"

[metadata]
category = "sorting"

[agent]
timeout_sec = 30.0

[verifier]
timeout_sec = 30.0
"""
DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /app
COPY number.txt /app/number.txt
"""
TEST = """\
#!/bin/bash
# The reward is 1 if the file holds the digits in order, else 0.
python3 - <<'CHECK' > /logs/verifier/reward.txt
from pathlib import Path
number = Path("/app/number.txt").read_text().strip()
answer = Path("/app/answer.txt")
print(int(answer.exists() and answer.read_text().strip() == "".join(sorted(number))))
CHECK
"""


def write_task(directory: Path, number: str) -> None:
    files = {
        "instruction.md": f"Sort {number}",
        "task.toml": TASK,
        "environment/Dockerfile": DOCKERFILE,
        "environment/number.txt": number,
        "tests/test.sh": TEST,
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(directory: Path) -> None:
    numbers = random.Random(1).sample(range(1000, 10000), 64 + 96)
    for split, chosen in (("train", numbers[:64]), ("test", numbers[64:])):
        for number in chosen:
            write_task(directory / split / f"sort-{number}", str(number))
    print(f"64 tasks in {directory / 'train'}, 96 in {directory / 'test'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/harbor-tasks"))

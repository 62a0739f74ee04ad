"""A text environment for gymnasium: sort the digits of one number after another, as long as the answers are right.

`Sort 5291` → `1259`, reward 1 → `Sort 4028` → `0248`, reward 1 → … A wrong answer ends the episode, and so does the
last of `rounds` right ones.
"""

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text


class SortingGame(gymnasium.Env[str, str]):
    def __init__(self, rounds: int = 3, length: int = 4) -> None:
        self.rounds, self.length = rounds, length
        self.observation_space = Text(max_length=32, charset=string.printable)
        self.action_space = Text(max_length=16, charset=string.digits)
        self.digits, self.left = "", rounds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = self.rounds
        return self._next(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_right = action == "".join(sorted(self.digits))
        self.left -= 1
        if not is_right or self.left == 0:
            return "The end.", float(is_right), True, False, {}
        return self._next(), 1.0, False, False, {}

    def _next(self) -> str:
        self.digits = "".join(str(digit) for digit in self.np_random.integers(0, 10, self.length))
        return f"Sort {self.digits}"


gymnasium.register("SortingGame-v0", SortingGame)

"""An OpenEnv environment: sort the digits of one number after another, as long as the answers are right.

`python -m examples.openenv_environment.sorting_rounds` serves it on port 8000; `areal train` makes it in its own
process.
"""

import random
from typing import Any
from uuid import uuid4

from openenv.core import Action, Environment, Observation, State


class SortAction(Action):
    digits: str


class SortObservation(Observation):
    text: str


class SortingRounds(Environment[SortAction, SortObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, rounds: int = 3, length: int = 4) -> None:
        super().__init__()
        self.rounds, self.length = rounds, length
        self._random = random.Random()
        self._number = ""
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> SortObservation:
        self._random = random.Random(seed)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return SortObservation(text=self._pose())

    def step(self, action: SortAction, timeout_s: float | None = None, **kwargs: Any) -> SortObservation:
        self._state.step_count += 1
        is_right = action.digits == "".join(sorted(self._number))
        if not is_right or self._state.step_count == self.rounds:
            return SortObservation(text="The end.", reward=float(is_right), done=True)
        return SortObservation(text=self._pose(), reward=1.0)

    @property
    def state(self) -> State:
        return self._state

    def _pose(self) -> str:
        self._number = "".join(self._random.choices("0123456789", k=self.length))
        return f"Sort {self._number}"


def main(port: int = 8000) -> None:
    import uvicorn
    from openenv.core import create_fastapi_app

    app = create_fastapi_app(SortingRounds, SortAction, SortObservation, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()

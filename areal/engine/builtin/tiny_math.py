"""`builtin:tiny-math`: a 0.3-million-parameter Qwen3 that has begun to learn sorting and sums, and no more."""

from areal.dataset.procedural import TASKS
from areal.engine.builtin.lessons import lessons
from areal.engine.builtin.recipe import Recipe

TINY_MATH = Recipe(name="tiny-math", edition=4, lessons=lessons, task=TASKS["sort-digits"])

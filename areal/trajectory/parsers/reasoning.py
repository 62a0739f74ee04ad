"""Thinking apart from the answer: what stands between the marks that a model puts around it, at the beginning only."""

from dataclasses import dataclass

from areal.trajectory.parsers.marks import partial_suffix


@dataclass(frozen=True)
class ReasoningMarks:
    name: str
    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking: some templates write the opening mark for the model."""
        return prompt.rstrip().endswith(self.open)

    def render(self, reasoning: str, content: str) -> str:
        return f"{self.open}\n{reasoning}\n{self.close}\n\n{content}"


class ReasoningReader:
    """Splits a growing answer; `feed` and `finish` give what is new of (thinking, content).

    White space beside a mark belongs to the format. Thinking that is never closed is thinking to the end.
    """

    def __init__(self, marks: ReasoningMarks, inside: bool) -> None:
        self._marks = marks
        self._held = ""
        self._state = self._inside if inside else self._before
        self._begun = False
        """Something other than white space was said in the present part."""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        return self._state(False)

    def finish(self) -> tuple[str, str]:
        return self._state(True)

    def _before(self, ended: bool) -> tuple[str, str]:
        start = self._held.lstrip()
        if start.startswith(self._marks.open):
            self._held, self._state = start[len(self._marks.open) :], self._inside
            return self._inside(ended)
        if self._marks.open.startswith(start) and not ended:
            return "", ""
        self._state, self._begun = self._behind, True
        return self._behind(ended)

    def _inside(self, ended: bool) -> tuple[str, str]:
        if not self._begun:
            self._held = self._held.lstrip()
        thought, closed, rest = self._held.partition(self._marks.close)
        if closed:
            self._held, self._state, self._begun = rest, self._behind, False
            return thought.rstrip(), self._behind(ended)[1]
        if not ended:
            thought = thought[: len(thought) - partial_suffix(thought, self._marks.close)].rstrip()
        self._held = self._held[len(thought) :]
        self._begun = self._begun or bool(thought)
        return thought, ""

    def _behind(self, ended: bool) -> tuple[str, str]:
        content, self._held = self._held if self._begun else self._held.lstrip(), ""
        self._begun = self._begun or bool(content)
        return "", content

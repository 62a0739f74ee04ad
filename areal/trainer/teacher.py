"""A teacher's half of an update: what it thinks of every token that the policy drew.

The policy's own log-probs are those of the weights before the first minibatch. The sampler's are the same where the
engine had these weights and computes as the trainer does; otherwise they are computed, and serve as the proximal ones.
"""

from areal.algorithms.distillation import distillation_advantages
from areal.config.training import TeacherConfig
from areal.engine.training.engine import TokenBatch
from areal.engine.training.learner import LogProbs


class TeacherUpdate:
    def __init__(self, teacher: LogProbs, student: LogProbs, config: TeacherConfig, *, as_sampled: bool) -> None:
        """`as_sampled`: the sampler's log-probs are the student's."""
        self._teacher = teacher
        self._student = student
        self._config = config
        self._as_sampled = as_sampled
        self.reverse_kl: float | None = None
        """Of the newest batch, per token; None = there has been none."""

    def teach(self, batch: TokenBatch) -> None:
        """Put what is taught in place of the batch's `advantages`, or add it; `proximal` may come among its fields."""
        fields, config = batch.fields, self._config
        if "proximal" not in fields and (not self._as_sampled or bool(fields["unreported"].any())):
            fields["proximal"] = self._student.logprobs(batch)
        student, teacher = fields.get("proximal", fields["behaviour"]), self._teacher.logprobs(batch)
        self.reverse_kl = float((student.double() - teacher.double()).mean()) if len(student) else None
        taught = config.weight * distillation_advantages(teacher, student, fields["completions"], config.discount)
        whole = taught + fields["advantages"].double() if config.with_rewards else taught
        fields["advantages"] = whole.to(fields["advantages"].dtype)

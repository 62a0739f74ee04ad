"""Every preset that TRL has, against TRL's own trainer: its advantages, its loss and its gradient. `make test-trl`.

TRL generates with a small random model, scores and computes its loss. This package's stages get the same rewards and
the same log-probs of the same model. Losses and the gradients of all parameters must be equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.algorithms.advantage import group_advantages, kl_costs, overlong_penalties
from areal.algorithms.correction import correct
from areal.algorithms.ratio import Completions
from areal.algorithms.stages import stage
from areal.config.algorithm import Algorithm
from areal.config.presets import resolve
from areal.config.training import ActorConfig
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.training.objective import PolicyObjective

# Not `trl`, which this directory would pass for.
pytest.importorskip("trl.trainer", reason="needs TRL in an environment of its own; run by make test-trl")
import transformers
import trl
import trl.rewards
from datasets import Dataset

pytestmark = pytest.mark.slow

SAMPLES, PROMPTS, LENGTH = 4, ["Sort 21", "Sort 4312"], 12
EPSILON = 1e-4
"""That TRL adds to a deviation; 1e-6 here."""


@dataclass(frozen=True)
class Scored:
    """A batch that a trainer of TRL has generated and scored, and its model in double precision."""

    trainer: Any
    inputs: dict[str, Tensor]
    rewards: Tensor
    """Of each sample."""

    @property
    def mask(self) -> Tensor:
        return self.inputs["completion_mask"].bool()

    def logprobs(self) -> Tensor:
        """Of the trained tokens [N], with a gradient."""
        ids = torch.cat([self.inputs["prompt_ids"], self.inputs["completion_ids"]], 1)
        mask = torch.cat([self.inputs["prompt_mask"], self.inputs["completion_mask"]], 1)
        length = self.inputs["completion_ids"].shape[1]
        found = self.trainer._get_per_token_logps_and_entropies(self.trainer.model, ids, mask, length)
        return self.flat(found[0])

    def flat(self, values: Tensor) -> Tensor:
        return values[self.mask]

    def padded(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)

    @property
    def completions(self) -> Tensor:
        count, length = self.mask.shape
        return self.flat(torch.arange(count)[:, None].expand(count, length))

    def gradient(self, loss: Tensor) -> Tensor:
        parameters = list(self.trainer.model.parameters())
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(PROMPTS, 261, 128)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    made = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(4)
    made.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def score(completion_ids: list[list[int]]) -> list[float]:
    """A reward with a spread within groups."""
    return [len({token % 5 for token in ids}) + ids[0] % 3 for ids in completion_ids]


def scored(model: Path, place: Path, trainer_class: str, **settings: Any) -> Scored:
    config = getattr(trl, trainer_class.replace("Trainer", "Config"))(
        output_dir=str(place), use_cpu=True, bf16=False, report_to="none", num_generations=SAMPLES,
        per_device_train_batch_size=SAMPLES * len(PROMPTS), max_completion_length=LENGTH, seed=1, save_strategy="no",
        gradient_checkpointing=False, **settings,
    )  # fmt: skip
    seen: list[float] = []

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **others: Any
    ) -> list[float]:
        seen[:] = score(completion_ids)
        return list(seen)

    trainer = getattr(trl, trainer_class)(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.model.double().eval()
    if trainer.ref_model is not None:
        trainer.ref_model.double().eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for each in trainer.ref_model.parameters():
                each.add_(torch.randn_like(each) * 0.05)
    torch.manual_seed(2)
    inputs = trainer._generate_and_score_completions([{"prompt": each} for each in PROMPTS for _ in range(SAMPLES)])
    return Scored(trainer, inputs, torch.tensor(seen, dtype=torch.float64))


def algorithm_of(**settings: Any) -> Algorithm:
    return resolve(ActorConfig(**settings), reference=True, max_new_tokens=LENGTH).algorithm


def our_loss(
    batch: Scored,
    algorithm: Algorithm,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    old: Tensor,
    behaviour: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Of the stages. `old`: what the ratio is taken to; `behaviour`: with the decoupled loss, what `old` is compared
    with."""
    completions = batch.completions
    weights = stage("loss_norm", algorithm.loss_norm)(completions, completions, algorithm).double()
    fields = {
        "weights": weights,
        "advantages": advantages,
        "behaviour": old if behaviour is None else behaviour,
        "proximal": old,
        "checkable": torch.zeros(len(logprobs), dtype=torch.bool),
        "completions": completions,
        "completion_tokens": Completions.of(completions).tokens_N,
    }
    if behaviour is not None:
        logs, whole = old - behaviour, Completions.of(completions)
        found = stage("correction", algorithm.correction)(logs, advantages, whole)
        fields["correction"] = correct(found, logs, advantages, whole, algorithm).weights
    if reference is not None:
        fields["reference"] = reference
    objective = PolicyObjective(algorithm, decoupled=behaviour is not None, recomputed=False)
    return objective(logprobs, fields)[0]


def their_loss(batch: Scored, **inputs: Tensor) -> Tensor:
    whole = {**batch.inputs, "num_items_in_batch": batch.mask.sum(), **inputs}
    return batch.trainer._compute_loss(batch.trainer.model, whole)  # type: ignore[no-any-return]


def require_same(batch: Scored, ours: Tensor, theirs: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-9)
    expected = batch.gradient(theirs)
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(batch.gradient(ours), expected, rtol=1e-5, atol=1e-7 * float(expected.abs().max()))


def of_samples(batch: Scored, values: Tensor) -> Tensor:
    """Per sample, on every token [N]."""
    return values.double()[batch.completions]


def shifted(logprobs: Tensor, scale: float = 0.5, seed: int = 5) -> Tensor:
    """Log-probs of an older policy."""
    generator = torch.Generator().manual_seed(seed)
    return logprobs.detach() + scale * torch.randn(len(logprobs), generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # TRL's settings, and ours
    "grpo": (
        {"loss_type": "grpo", "beta": 0.04, "epsilon": 0.2, "use_bias_correction_kl": False}, {"algorithm": "grpo"}
    ),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"algorithm": "dr_grpo"}),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
        {"algorithm": "dapo", "overlong_share": 0.0},
    ),
    "default": ({"loss_type": "bnpo", "delta": 3.0, "scale_rewards": "none"}, {"algorithm": "default"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"algorithm": "gspo"},
    ),
    "gspo, wide": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.2, "epsilon_high": 0.3},
        {"algorithm": "gspo", "eps_clip": 0.2, "eps_clip_higher": 0.3},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"algorithm": "cispo"}),
    "cispo, close": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"algorithm": "cispo", "eps_clip_higher": 0.2}),
    "sapo": ({"loss_type": "sapo"}, {"algorithm": "sapo"}),
    "corrected KL": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"algorithm": "grpo", "kl_ctl": 0.1, "kl": "k3_corrected"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_advantages_loss_and_gradient_are_trls(case: str, model: Path, tmp_path: Path) -> None:
    theirs, ours = CASES[case]
    algorithm = algorithm_of(**ours)
    batch = scored(model, tmp_path, "GRPOTrainer", **theirs)
    groups = torch.arange(len(batch.rewards)) // SAMPLES
    advantages = group_advantages(batch.rewards, groups, algorithm.group_baseline, algorithm.adv_norm)
    torch.testing.assert_close(batch.inputs["advantages"].double(), advantages, rtol=1e-3, atol=1e-6)  # by EPSILON
    assert float(advantages.abs().max()) > 0.3
    # From here on with theirs, so that the two constants do not hide a difference.
    advantages = of_samples(batch, batch.inputs["advantages"])
    logprobs = batch.logprobs()
    old = shifted(logprobs)
    given = {"old_per_token_logps": batch.padded(old)}
    reference = None
    if algorithm.kl_ctl:
        reference = batch.flat(batch.inputs["ref_per_token_logps"]).double()
        given["ref_per_token_logps"] = batch.padded(reference)
    require_same(
        batch,
        our_loss(batch, algorithm, logprobs, advantages, old=old, reference=reference),
        their_loss(batch, **given),
    )


WEIGHTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    # Ours, and what TRL's vllm_importance_sampling_mode does with the log-weights of a row
    "token_truncate": ({"correction_bound": "truncate"}, lambda logs: logs.exp().clamp(max=1.5)),
    "token_mask": ({}, lambda logs: logs.exp().masked_fill(logs.exp() > 1.5, 0.0)),
    "sequence_truncate": (
        {"correction": "sequence", "correction_bound": "truncate"}, lambda logs: logs.sum().exp().clamp(max=1.5)
    ),
    "sequence_mask": (
        {"correction": "sequence"}, lambda logs: logs.sum().exp().masked_fill(logs.sum().exp() > 1.5, 0.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_the_decoupled_loss_is_trls_with_its_importance_sampling_correction(
    case: str, model: Path, tmp_path: Path
) -> None:
    ours, weigh = WEIGHTS[case]
    algorithm = algorithm_of(algorithm="dapo+decoupled", overlong_share=0.0, behave_imp_weight_cap=1.5, **ours)
    batch = scored(model, tmp_path, "GRPOTrainer", loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
    batch.trainer.use_vllm, batch.trainer.vllm_importance_sampling_correction = True, True
    advantages, logprobs = of_samples(batch, batch.inputs["advantages"]), batch.logprobs()
    old, behaviour = shifted(logprobs, 0.3), shifted(logprobs, 0.3, seed=6)
    weights = torch.cat([
        weigh(part).expand(len(part)) for part in (old - behaviour).split(batch.mask.sum(1).tolist())
    ])  # fmt: skip
    theirs = their_loss(batch, old_per_token_logps=batch.padded(old), importance_sampling_ratio=batch.padded(weights))
    require_same(batch, our_loss(batch, algorithm, logprobs, advantages, old=old, behaviour=behaviour), theirs)


def test_the_mask_of_bad_completions_is_trls(model: Path, tmp_path: Path) -> None:
    algorithm = algorithm_of(algorithm="grpo+decoupled", behave_imp_weight_cap=None, negative_mask=0.001, kl_ctl=0.0)
    batch = scored(model, tmp_path, "GRPOTrainer", loss_type="grpo", epsilon=0.2, off_policy_mask_threshold=0.001)
    batch.trainer.use_vllm, batch.trainer.vllm_importance_sampling_correction = True, True
    advantages, logprobs = of_samples(batch, batch.inputs["advantages"]), batch.logprobs()
    old, behaviour = logprobs.detach(), shifted(logprobs, 0.5)
    theirs = their_loss(
        batch,
        old_per_token_logps=batch.padded(old),
        sampling_per_token_logps=batch.padded(behaviour),
        importance_sampling_ratio=batch.padded((old - behaviour).exp()),
    )
    ours = our_loss(batch, algorithm, logprobs, advantages, old=old, behaviour=behaviour)
    require_same(batch, ours, theirs)
    unmasked = our_loss(batch, algorithm_of(algorithm="grpo+decoupled", behave_imp_weight_cap=None, kl_ctl=0.0),
                        logprobs, advantages, old=old, behaviour=behaviour)  # fmt: skip
    assert abs(unmasked.item() - ours.item()) > 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.03])
def test_rloo_is_trls(beta: float, model: Path, tmp_path: Path) -> None:
    """On samples of the policy itself, where TRL's clip of the ratio of whole completions holds nothing."""
    algorithm = algorithm_of(algorithm="rloo", kl_ctl=beta)
    batch = scored(model, tmp_path, "RLOOTrainer", beta=beta)
    logprobs, completions = batch.logprobs(), batch.completions
    returns = of_samples(batch, batch.rewards)
    if beta:
        reference = reference_logprobs(batch)
        kl = logprobs.detach() - reference
        returns = returns - beta * kl_costs(kl, completions, torch.arange(len(kl)), per_token=False)
    groups = completions // SAMPLES
    advantages = group_advantages(returns, groups, "leave_one_out", "none", completions, completions)
    expected = of_samples(batch, batch.inputs["advantages"])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    sums = batch.padded(logprobs.detach()).sum(1)
    theirs = their_loss(batch, old_logps=sums)
    ours = our_loss(batch, algorithm, logprobs, expected, old=logprobs.detach())
    gradient = batch.gradient(theirs)
    torch.testing.assert_close(batch.gradient(ours), gradient, rtol=1e-5, atol=1e-7 * float(gradient.abs().max()))


def reference_logprobs(batch: Scored) -> Tensor:
    ids = torch.cat([batch.inputs["prompt_ids"], batch.inputs["completion_ids"]], 1)
    mask = torch.cat([batch.inputs["prompt_mask"], batch.inputs["completion_mask"]], 1)
    length = batch.inputs["completion_ids"].shape[1]
    with torch.no_grad():
        found = batch.trainer._get_per_token_logps_and_entropies(batch.trainer.ref_model, ids, mask, length)
    return batch.flat(found[0])


@pytest.mark.parametrize("length", [1, 70, 79, 80, 81, 90, 99, 100])
def test_the_overlong_penalty_is_trls(length: int) -> None:
    theirs = trl.rewards.get_soft_overlong_punishment(100, 20)([[0] * length])[0]
    assert -overlong_penalties(torch.tensor([length]), 100, 0.2).item() == pytest.approx(theirs)

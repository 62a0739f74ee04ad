"""What ranks cannot train is refused before anything starts, with a backend that can."""

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, write_family
from ranks_harness import opened_ranks

from areal.api.errors import ModelError
from areal.config.errors import ConfigError
from areal.config.experiment import SFTConfig
from areal.config.parallel import Ranks
from areal.engine.sharded.trainable import require_trainable
from areal.trainer.sft import SFTTrainer


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "refusal"),
    [
        ("Llama", {}, Ranks(1, 4), r"must divide a model's num_key_value_heads, which is 2 .*, got t4; .* fsdp:d2t2$"),
        ("Qwen2", {}, Ranks(2, 3), r"must divide a model's num_attention_heads, which is 4 .*, got t3; .* fsdp:d3t2$"),
        ("Qwen3Moe", {"num_experts": 3}, Ranks(1, 2), r"num_experts, which is 3 .*, got t2; .* fsdp:d2$"),
        ("Qwen3Moe", {"tie_word_embeddings": True}, Ranks(2, 2), r"has tie_word_embeddings; .* fsdp:d4$"),
        ("Gemma", {"num_key_value_heads": 1}, Ranks(2, 2), r"num_key_value_heads, which is 1 .*, got t2; .* fsdp:d4$"),
    ],
)
def test_heads_and_experts_are_whole(
    family: str, changes: dict[str, Any], ranks: Ranks, refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=refusal):
        require_trainable(write_family(family, tmp_path, **changes), ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_trained_on_data_and_tensor_parallel_ranks(family: str, tmp_path: Path) -> None:
    require_trainable(write_family(family, tmp_path), Ranks(3, 2))


def test_tensor_parallelism_is_for_families_that_were_compared(tmp_path: Path) -> None:
    from transformers import Olmo2Config

    Olmo2Config().save_pretrained(tmp_path)
    require_trainable(tmp_path, Ranks(4, 1))
    with pytest.raises(ModelError, match=r"qwen3_moe, .* holds a olmo2; set actor.backend to fsdp:d4"):
        require_trainable(tmp_path, Ranks(2, 2))


def test_refused_model_starts_no_rank(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with (
        pytest.raises(ModelError, match="got t4"),
        opened_ranks(write_family("Llama", tmp_path / "model"), "fsdp:t4", logs),
    ):
        pass
    assert not list(logs.glob("*rank*"))


def test_more_ranks_than_a_machine_can_compute_with_are_refused(tmp_path: Path) -> None:
    config = SFTConfig(experiment_name="many", trial_name="one", output_dir=str(tmp_path))
    config.actor.backend = "fsdp:d999"
    with pytest.raises(ConfigError, match=r"starts 999 ranks on this machine, which has \d+ cores; use fewer"):
        SFTTrainer(config, [{"messages": [{"role": "user", "content": "1"}], "answer": "1"}])

"""Whether a run fits: the arithmetic, and that what it advises is true. Measured memory: tests/benchmarks."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import write_model

from areal.api.errors import ModelError
from areal.config.experiment import GRPOConfig, PPOConfig
from areal.config.parallel import Ranks
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import ActorConfig, LoraConfig, ReferenceConfig, SchedulerConfig
from areal.engine import memory
from areal.engine.host_memory import small_files
from areal.engine.memory import AdapterSize, Serving, Training, pass_terms, state_terms, trie_tokens
from areal.engine.model.shape import ModelShape, read_shape
from areal.engine.models import open_adapted
from areal.engine.sizing import GIB, HostMemory, gpu_verdict, plan, remedies, verdict, with_settings

CONFIGS = Path(__file__).parent / "model_configs"
H100_NODE = HostMemory(1000 * GIB, 500 * GIB, 80 * GIB, 8)


def shape(name: str) -> ModelShape:
    return read_shape(CONFIGS / name)


def config(**actor: object) -> GRPOConfig:
    return GRPOConfig(
        actor=ActorConfig(path="a model", **actor),  # type: ignore[arg-type]
        gconfig=GenerationHyperparameters(n_samples=8, max_new_tokens=4096),
        rollout=RolloutConfig(backend="vllm:d4t2", gpus=2, dtype="bfloat16"),
        scheduler=SchedulerConfig(type="ray"),  # as many GPUs as it takes
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_parameters_follow_from_config_json_alone(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


def test_a_builtin_model_is_as_large_as_it_is_said_to_be_before_it_is_made(tiny_math: Path) -> None:
    with small_files("builtin:tiny-math") as directory:
        assert directory != tiny_math
        assert read_shape(directory) == read_shape(tiny_math)


def test_a_directory_without_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(ModelError, match="lacks 'num_attention_heads'"):
        read_shape(tmp_path)


def test_a_mixture_computes_with_the_experts_of_a_token_and_stores_all() -> None:
    mixture = shape("qwen3-30b-a3b")
    assert mixture.intermediate_size == 8 * 768
    assert mixture.layer_parameters > 128 * 3 * 768 * 2048


def test_state_is_sixteen_bytes_for_each_parameter_and_divided_by_ranks() -> None:
    model = shape("qwen2.5-7b")
    alone = sum(state_terms(model, Training(1024, Ranks(1, 1))).values())
    assert alone == 16 * model.parameters
    assert sum(state_terms(model, Training(1024, Ranks(8, 1))).values()) == pytest.approx(alone / 8, rel=1e-6)
    # Tensor parallelism leaves the embedding whole.
    halved = sum(state_terms(model, Training(1024, Ranks(1, 2))).values())
    assert halved == pytest.approx((alone + 16 * model.embedding_parameters) / 2, rel=1e-4)


def test_checkpointing_keeps_one_layer_and_the_stream_of_the_others() -> None:
    model = shape("qwen2.5-7b")
    plain = pass_terms(model, Training(16384))["activations"]
    again = pass_terms(model, Training(16384, checkpointing=True))["activations"]
    assert again < plain / 10
    assert pass_terms(model, Training(8192))["activations"] == pytest.approx(plain / 2, rel=1e-6)
    assert pass_terms(model, Training(16384, dtype="bfloat16"))["activations"] < 0.6 * plain


def test_logits_of_a_long_pass_are_held_in_pieces() -> None:
    model = shape("smollm2-135m")
    pieces = [pass_terms(model, Training(tokens, checkpointing=True))["in flight"] for tokens in (4096, 65536)]
    assert max(pieces) < 4 * 4 * memory.HEAD_ELEMENTS * 65536 / 4096


def test_a_group_shares_its_prompt_only_where_that_pays() -> None:
    assert trie_tokens(prompt=100, answer=30, samples=8) == 100 + 8 * 30
    assert trie_tokens(prompt=500, answer=4000, samples=8) == 0


def test_the_reference_takes_its_weights_and_a_further_model_its_whole_state() -> None:
    model, settings = shape("qwen2.5-7b"), config(backend="fsdp:d8", gpus=1)
    alone = plan(settings, {"actor": model}, H100_NODE).of("actor ranks")
    with_reference = plan(settings, {"actor": model, "ref": model}, H100_NODE).of("actor ranks")
    with_critic = plan(settings, {"actor": model, "critic": model}, H100_NODE).of("actor ranks")
    assert alone
    assert with_reference
    assert with_critic
    assert with_reference.total - alone.total == 4 * model.parameters // 8
    assert with_critic.total - alone.total == pytest.approx(16 * model.parameters / 8, rel=1e-6)


def test_what_does_not_fit_is_named_with_settings_that_do() -> None:
    models, settings = {"actor": shape("qwen2.5-7b")}, config(backend="fsdp:d8", gpus=1, dtype="bfloat16")
    demand = plan(settings, models, H100_NODE).of("actor ranks")
    assert demand
    assert not demand.fits
    found = remedies(settings, models, H100_NODE, "actor ranks")
    assert {"actor.gradient_checkpointing": True} in [each.settings for each in found]
    for each in found:
        changed = plan(with_settings(settings, each.settings), models, H100_NODE).of("actor ranks")
        assert changed
        assert changed.fits
        assert changed.total == each.total
    said = verdict(demand, found)
    assert said.startswith("does not fit: 1")
    assert "of 76.0 GiB on actor ranks; set actor.gradient_checkpointing=true or " in said


def test_a_large_model_is_advised_several_settings_together() -> None:
    models, settings = {"actor": shape("llama-3.1-70b")}, config(backend="fsdp:d8", gpus=1, dtype="bfloat16")
    found = remedies(settings, models, H100_NODE, "actor ranks")
    assert found
    assert all(len(each.settings) > 1 for each in found)


def test_what_nothing_helps_is_said_so() -> None:
    models, settings = {"actor": shape("llama-3.1-70b")}, config(backend="fsdp:d8", gpus=1)
    small = replace(H100_NODE, gpu_bytes=1 * GIB)
    demand = plan(settings, models, small).of("actor ranks")
    assert demand
    found = remedies(settings, models, small, "actor ranks")
    assert found == []
    assert "take a larger machine or a smaller model" in verdict(demand, found)


def test_vllm_needs_room_for_a_sequence_of_the_greatest_length() -> None:
    models = {"actor": shape("llama-3.1-70b")}
    settings = config(backend="fsdp:d64", gpus=1, dtype="bfloat16", gradient_checkpointing=True)
    engines = plan(settings, models, H100_NODE).of("engines")
    assert engines
    assert not engines.fits  # two GPUs hold 140 GB of weights, and no cache beside them
    found = remedies(settings, models, H100_NODE, "engines")
    assert {"rollout.backend": "vllm:d4t4", "rollout.gpus": 4} in [each.settings for each in found]


def test_vllm_takes_the_share_of_its_argument() -> None:
    models, settings = {"actor": shape("qwen2.5-7b")}, config(backend="fsdp:d8", gpus=1)
    settings.rollout.engine_args = ["--gpu-memory-utilization", "0.5"]
    engines = plan(settings, models, H100_NODE).of("engines")
    assert engines
    assert engines.limit == 40 * GIB
    assert engines.total == engines.limit


def test_processes_that_state_no_gpus_share_one() -> None:
    models, settings = {"actor": shape("smollm2-135m")}, config()
    settings.rollout = RolloutConfig(backend="embedded", max_concurrent_rollouts=16)
    assert plan(settings, models, H100_NODE).demands[0].place == "the GPU of trainer and engine"
    settings.actor.gpus, settings.rollout.gpus = 1, 1
    assert [each.place for each in plan(settings, models, H100_NODE).demands][:2] == ["trainer", "engines"]


def test_a_gpu_that_two_share_is_advised_to_be_two_with_what_each_needs() -> None:
    models, settings = {"actor": shape("qwen2.5-7b")}, config(dtype="bfloat16")
    settings.rollout = RolloutConfig(backend="embedded", dtype="bfloat16")
    (found,) = remedies(settings, models, H100_NODE, "the GPU of trainer and engine")
    assert found.settings["rollout.gpus"] == 1
    changed = plan(with_settings(settings, found.settings), models, H100_NODE)
    assert all(each.fits for each in changed.demands if each.place in ("trainer", "actor ranks", "engines"))
    assert " and " in str(found)


def test_without_gpus_everything_is_host_memory_and_ranks_do_not_help() -> None:
    models = {"actor": shape("smollm2-135m")}
    machine = HostMemory(16 * GIB, 8 * GIB)
    settings = config(max_tokens_per_mb=512)
    settings.rollout = RolloutConfig(backend="embedded", max_concurrent_rollouts=16)
    settings.gconfig.max_new_tokens = 256
    planned = plan(settings, models, machine)
    assert planned.fits
    host, trainer = planned.of("host memory"), planned.of("trainer")
    assert host
    assert trainer
    assert trainer.limit is None
    assert host.terms["trainer"] == trainer.total
    assert not [
        each
        for each in remedies(settings, models, HostMemory(4 * GIB, 8 * GIB), "host memory")
        if "actor.backend" in each.settings
    ]


def test_offload_moves_the_state_to_the_host() -> None:
    models = {"actor": shape("qwen2.5-7b")}
    here = plan(config(backend="fsdp:d8", gpus=1, offload=True), models, H100_NODE)
    there = plan(config(backend="fsdp:d8", gpus=1), models, H100_NODE)
    for place, moved in (("actor ranks", 1), ("host memory", -8)):
        with_offload, without = here.of(place), there.of(place)
        assert with_offload
        assert without
        assert without.total - with_offload.total == pytest.approx(moved * 16 * 7_615_616_512 / 8, rel=1e-6)


def test_publishing_needs_two_versions_in_shared_memory() -> None:
    planned = plan(config(backend="fsdp:d8", gpus=1), {"actor": shape("qwen2.5-7b")}, replace(H100_NODE, shm_bytes=GIB))
    demand = planned.of("shared memory")
    assert demand
    assert demand.total == 2 * 4 * 7_615_616_512
    assert "docker run --shm-size=64g" in verdict(demand, [])


def test_constants_are_those_of_the_code_that_is_planned() -> None:
    from areal.engine.inference import decoder_runner, kv_cache, torch_kernel
    from areal.engine.native import kernel
    from areal.engine.training import head, packing

    assert memory.HEAD_ELEMENTS == head.HEAD_ELEMENTS
    assert memory.PAIRS_PER_TOKEN == packing.PAIRS_PER_TOKEN
    assert memory.SMALLEST_POOL == kv_cache.SMALLEST_POOL
    assert memory.PREFIX_MEMORY_SHARE == decoder_runner.PREFIX_MEMORY_SHARE
    assert memory.COPIES_MEMORY_SHARE == torch_kernel.COPIES_MEMORY_SHARE
    assert memory.SMALLEST_COPIED_BYTES == torch_kernel.SMALLEST_BYTES
    assert memory.PACKED_MEMORY_SHARE == kernel.PACKED_MEMORY_SHARE


def test_the_native_kernel_packs_the_weights_and_keeps_its_cache_in_float32() -> None:
    model = shape("smollm2-135m")
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        native, torch = (
            memory.embedded_terms(model, Serving(8, 128, dtype, kernel=kernel), 64 * GIB, on_cpu=True, remembered=0)
            for kernel in ("auto", "torch")
        )
        assert native["packed weights"] == item * model.parameters
        assert native["KV cache"] == torch["KV cache"] * 4 // item
        assert "packed weights" not in torch
        assert torch["faster layouts"] == 2 * item * model.parameters


def test_keys_and_values_are_spread_over_the_gpus_of_a_server() -> None:
    model = shape("qwen2.5-7b")
    assert memory.kv_token_bytes(model, Serving(1, 1, "bfloat16")) == 2 * 28 * 4 * 128 * 2
    assert memory.kv_token_bytes(model, Serving(1, 1, "bfloat16", gpus=4)) == 2 * 28 * 128 * 2


def test_more_gpus_than_there_are_do_not_fit_and_are_not_advised() -> None:
    models = {"actor": shape("qwen2.5-7b")}
    settings = config(backend="fsdp:d4", gpus=1, dtype="bfloat16")
    settings.rollout = RolloutConfig(backend="vllm:d4", gpus=1, dtype="bfloat16")
    settings.scheduler = SchedulerConfig(type="local")
    planned = plan(settings, models, replace(H100_NODE, gpus_per_node=4))
    assert not planned.fits
    assert "asks for 8 GPUs, 4 are there" in gpu_verdict(planned)
    assert plan(settings, models, H100_NODE).enough_gpus
    advised = remedies(settings, models, H100_NODE, "actor ranks")
    assert advised
    assert not [each for each in advised if "actor.backend" in each.settings]
    for kind, fitting in (("slurm", True), ("ray", True), ("local", False)):
        settings.scheduler = SchedulerConfig(type=kind, nodes=2)  # type: ignore[arg-type]
        assert plan(settings, models, replace(H100_NODE, gpus_per_node=4)).enough_gpus == fitting


def test_what_is_advised_for_one_place_leaves_room_in_the_others() -> None:
    models, settings = {"actor": shape("qwen2.5-7b")}, config(backend="fsdp:d4", gpus=1, dtype="bfloat16")
    settings.rollout = RolloutConfig(backend="vllm:d4", gpus=1, dtype="bfloat16")
    settings.actor.gradient_checkpointing = True
    settings.scheduler = SchedulerConfig(type="local")
    small = replace(H100_NODE, gpu_bytes=24 * GIB)
    assert {"actor.offload": True} in [each.settings for each in remedies(settings, models, small, "actor ranks")]
    # The state that was moved there would not fit the host.
    smaller = replace(small, host_bytes=200 * GIB)
    assert plan(settings, models, smaller).of("host memory").fits  # type: ignore[union-attr]
    advised = remedies(settings, models, smaller, "actor ranks")
    assert not [each for each in advised if "actor.offload" in each.settings]


@pytest.mark.slow
def test_an_adapter_is_planned_with_the_parameters_that_it_has(tmp_path: Path) -> None:
    """Sixteen bytes for each of its own, four for the model's; the reference is the model that is there."""
    model = write_model(tmp_path / "model")
    tiny = read_shape(model)
    for lora in (LoraConfig(rank=3), LoraConfig(rank=5, targets=["q_proj", "down_proj"])):
        planned = AdapterSize(lora.rank or 0, tuple(lora.targets)).parameters(tiny)
        assert planned == len(open_adapted(model, lora, name="m", seed=1).flat)
    adapted = PPOConfig(
        actor=ActorConfig(kl_ctl=0.1, lora=LoraConfig(rank=3)),
        ref=ReferenceConfig("builtin:tiny-math"),
        gconfig=GenerationHyperparameters(n_samples=2),
    )
    whole = replace(adapted, actor=ActorConfig(kl_ctl=0.1))
    machine = HostMemory(64 << 30, 8 << 30)
    small, large = (plan(each, {"actor": tiny, "ref": tiny}, machine) for each in (adapted, whole))
    trained = AdapterSize(3).parameters(tiny)
    trainer, full = small.of("trainer"), large.of("trainer")
    assert trainer is not None
    assert full is not None
    assert "reference" in full.terms
    assert "reference" not in trainer.terms
    assert trainer.terms["optimizer"] == 8 * trained < full.terms["optimizer"]
    assert trainer.terms["weights"] == full.terms["weights"] + 4 * trained
    assert trainer.terms["in flight"] <= full.terms["in flight"]
    published = small.of("shared memory")
    assert published is not None
    assert published.total == 2 * 4 * trained
    engines = small.of("engines")
    assert engines is not None
    assert engines.terms["adapted layers"] == 2 * 4 * AdapterSize(3).adapted(tiny)

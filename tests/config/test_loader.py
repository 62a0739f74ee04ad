import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal.api.cli_args import ConfigError, GenerationHyperparameters, GRPOConfig, SFTConfig, load_expr_config
from areal.config.loader import build, to_dict


def load(*words: str) -> GRPOConfig:
    return load_expr_config(list(words), GRPOConfig)[0]


def load_text(tmp_path: Path, text: str, *words: str) -> GRPOConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load("--config", str(path), *words)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*words)
    assert "\n" not in str(caught.value), "a refusal is one line"
    return str(caught.value)


def test_file_and_overrides_fill_the_config_and_the_path_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 3\nactor:\n  optimizer: {lr: 1e-3}\n")
    config, where = load_expr_config([f"--config={path}", "actor.optimizer.lr=2e-4", "gconfig.n_samples=4"], GRPOConfig)
    assert (config.seed, config.actor.optimizer.lr, config.gconfig.n_samples) == (3, 2e-4, 4)
    assert where == str(path)


def test_without_a_file_the_defaults_hold() -> None:
    assert load_expr_config([], GRPOConfig) == (GRPOConfig(tokenizer_path=GRPOConfig().actor.path), "")


@pytest.mark.parametrize("text", ["2e-4", "2E-4", "0.0002", ".0002", "+2.0e-4", "2.e-4"])
def test_every_way_to_write_a_number_is_one(tmp_path: Path, text: str) -> None:
    assert load(f"actor.optimizer.lr={text}").actor.optimizer.lr == 2e-4
    assert load_text(tmp_path, f"actor: {{optimizer: {{lr: {text}}}}}").actor.optimizer.lr == 2e-4


def test_whole_number_is_accepted_where_a_number_is_wanted_but_not_the_reverse() -> None:
    assert load("gconfig.temperature=1").gconfig.temperature == 1.0
    assert refusal("seed=1.5") == "seed must be a whole number, got 1.5"


def test_a_number_with_a_leading_zero_is_decimal() -> None:
    assert load("seed=010").seed == 10


@pytest.mark.parametrize("text", ["007", "1.10", "true", "2026-01-01", "off", "a=b", "[x", "a: b"])
def test_text_override_is_kept_to_the_letter(text: str) -> None:
    assert load(f"trial_name={text}").trial_name == text


@pytest.mark.parametrize("text", ["null", "None", "~"])
def test_optional_setting_can_be_unset(text: str) -> None:
    assert load(f"trial_name={text}").trial_name is None


def test_a_setting_may_be_a_word_or_a_number(tmp_path: Path) -> None:
    assert [load(f"store.keep_tokens={word}").store.steps_with_tokens for word in ("all", "none", "20")] == [
        None,
        0,
        20,
    ]
    assert load_text(tmp_path, "store: {keep_tokens: 20}").store.steps_with_tokens == 20
    for wrong in ("some", "1.5", "null", "true"):
        assert "must be all, none or a whole number" in refusal(f"store.keep_tokens={wrong}")
    assert refusal("store.keep_tokens=0").startswith("store.keep_tokens must be all, none or a number of steps >= 1")


def test_number_in_the_file_where_text_is_wanted_asks_for_quotes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trial_name must be text, got 1\.1; put it in quotes"):
        load_text(tmp_path, "trial_name: 1.10")
    assert load_text(tmp_path, 'trial_name: "1.10"').trial_name == "1.10"
    assert load_text(tmp_path, "trial_name: 2026-01-01").trial_name == "2026-01-01"


def test_off_is_a_word_not_a_boolean(tmp_path: Path) -> None:
    assert load_text(tmp_path, "recover: {mode: off}").recover.mode == "off"
    assert refusal("train_dataset.shuffle=yes") == "train_dataset.shuffle must be true or false, got 'yes'"


def test_lists_come_from_file_and_overrides(tmp_path: Path) -> None:
    assert load("gconfig.stop=[a, b]").gconfig.stop == ["a", "b"]
    assert load_text(tmp_path, "gconfig: {stop_token_ids: [1, 2]}").gconfig.stop_token_ids == [1, 2]
    assert refusal("gconfig.stop_token_ids=[1, x]") == "gconfig.stop_token_ids[1] must be a whole number, got 'x'"
    assert refusal("gconfig.stop=a") == "gconfig.stop must be a list, got 'a'"


def test_section_keeps_its_owners_defaults_when_partly_set() -> None:
    assert load("gconfig.temperature=0.9").gconfig == GenerationHyperparameters(n_samples=8, temperature=0.9)
    sft, _ = load_expr_config(["actor.eps_clip=0.1"], SFTConfig)
    assert sft.actor.optimizer.lr == 1e-3
    sft, _ = load_expr_config(["actor.optimizer.warmup_steps=0"], SFTConfig)
    assert sft.actor.optimizer.lr == 1e-3


def test_empty_section_is_the_default_section(tmp_path: Path) -> None:
    assert load_text(tmp_path, "actor:\nseed: 2\n").actor == GRPOConfig().actor
    assert load_text(tmp_path, "actor:\n", "actor.eps_clip=0.1").actor.eps_clip == 0.1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sed=1", "unknown setting sed; did you mean seed?"),
        (
            "rollout.max_head_offpolicy=1",
            "unknown setting rollout.max_head_offpolicy; did you mean rollout.max_head_offpolicyness?",
        ),
        ("lr=1e-3", "unknown setting lr; did you mean actor.optimizer.lr or critic.optimizer.lr?"),
        (
            "scheduler.kind=local",
            "unknown setting scheduler.kind; known here: address, heartbeat_seconds, max_restarts, nodes, "
            "place_seconds, ray_address, slurm_arguments, threads, type",
        ),
        ("=1", "an argument must be --config FILE or KEY=VALUE, got '=1'"),
        ("train", "an argument must be --config FILE or KEY=VALUE, got 'train'"),
        ("run.yaml", "an argument must be --config FILE or KEY=VALUE, got 'run.yaml'; write --config run.yaml"),
        ("--config", "--config needs a file name; write --config FILE.yaml"),
        ("actor=5", "actor is a section with settings of its own, got 5"),
        ("rollout.openai=5", "rollout.agent is a section with settings of its own, got 5"),
        ("scheduler.type=cloud", "scheduler.type must be one of local, slurm, ray; got 'cloud'"),
        ("gconfig.temperature=.inf", "gconfig.temperature must be a finite number, got inf"),
        ("gconfig.temperature=warm", "gconfig.temperature must be a finite number, got 'warm'"),
        ("seed=true", "seed must be a whole number, got True"),
        ("seed=", "seed must be a whole number, got ''"),
    ],
)
def test_refusal_says_the_rule_and_the_remedy(word: str, message: str) -> None:
    assert refusal(word) == message


def test_unknown_key_in_the_file_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting actor\.optimiser; did you mean actor\.optimizer\?"):
        load_text(tmp_path, "actor: {optimiser: {lr: 1}}")


def test_override_below_a_value_is_refused() -> None:
    assert refusal("seed=1", "seed.x=2") == "'seed.x=2': seed is a value, not a section"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor.kl_ctl=0.1"], "actor.kl_ctl=0.1 needs a reference model; set ref.path"),
        (
            ["gconfig.seed=7"],
            "gconfig.seed must be empty in training, got 7: it would make all samples of a task equal",
        ),
        (["gconfig.n_samples=1"], "actor.group_baseline=mean with gconfig.n_samples=1 makes every advantage 0"),
        (
            ["gconfig.n_samples=1", "actor.group_baseline=none", "actor.adv_norm=group"],
            "actor.adv_norm=group needs gconfig.n_samples > 1",
        ),
        (
            ["critic.path=builtin:tiny-math"],
            "critic.path=builtin:tiny-math takes advantages against values, and actor.group_baseline=mean against the "
            "group; set actor.group_baseline=none",
        ),
        (
            ["actor.gae_lambda=0.9"],
            "actor.gae_lambda=0.9 needs a critic; set critic.path (usually builtin:tiny-math) or leave it out",
        ),
        (["actor.discount=0.9"], "actor.discount=0.9 needs a critic; set critic.path (usually builtin:tiny-math)"),
        (["actor.gae_over=episode"], "actor.gae_over=episode needs a critic; set critic.path"),
        (["actor.discount=1.1"], "actor.discount must lie in [0, 1], got 1.1"),
        (["critic.eps_clip=0"], "critic.eps_clip must be > 0, got 0.0; use null for no clip"),
        (["critic.warmup_steps=-1"], "critic.warmup_steps must be >= 0, got -1"),
        (["actor.ppo_n_minibatches=64", "train_dataset.batch_size=32"], "actor.ppo_n_minibatches=64 exceeds"),
        (["rollout.in_process=true", "rollout.num_workers=2"], "rollout.in_process runs one worker"),
        (["rollout.max_head_offpolicyness=-1"], "rollout.max_head_offpolicyness must be >= 0, got -1; use 0 for"),
        (
            ["rollout.when_stale=train", "actor.use_decoupled_loss=false"],
            "rollout.when_stale=train trains samples of any age, which needs the decoupled loss, got "
            "actor.use_decoupled_loss=false; set it to true, or rollout.when_stale to wait or drop",
        ),
        (["rollout.when_stale=never"], "rollout.when_stale must be one of"),
        (["valid_dataset.batch_size=0"], "valid_dataset.batch_size must be >= 1, got 0"),
        (["actor.optimizer.lr=0"], "actor.optimizer.lr must be > 0, got 0.0"),
        (["actor.optimizer.beta2=1"], "actor.optimizer.beta2 must lie in [0, 1), got 1.0"),
        (["actor.optimizer.eps=0"], "actor.optimizer.eps must be > 0, got 0.0"),
        (["actor.optimizer.weight_decay=-1"], "actor.optimizer.weight_decay must be >= 0, got -1.0"),
        (["actor.dual_clip=1"], "actor.dual_clip must be > 1, got 1.0; use null for no bound"),
        (["actor.behave_imp_weight_cap=0"], "actor.behave_imp_weight_cap must be > 0, got 0.0; use null for no cap"),
        (["trial_name=../x"], "trial_name must be a plain directory name, got '../x'"),
        (["total_train_steps=0"], "total_train_steps must be >= 1, got 0"),
    ],
)
def test_values_and_combinations_that_mean_nothing_are_refused_by_their_full_name(
    words: list[str], message: str
) -> None:
    assert refusal(*words).startswith(message)


@pytest.mark.parametrize(
    "setting", ["algorithm=", "use_decoupled_loss=true", "recompute_logprob=true", "dtype=bfloat16"]
)
def test_samples_of_any_age_are_trained_with_the_decoupled_loss_chosen_or_implied(tmp_path: Path, setting: str) -> None:
    config = load_text(tmp_path, "rollout: {when_stale: train}", f"actor.{setting}")
    assert config.rollout.when_stale == "train"


def test_critic_needs_no_group(tmp_path: Path) -> None:
    text = (
        "{critic: {path: a/b, optimizer: {lr: 1.0e-3}}, actor: {group_baseline: none, gae_lambda: 0.9, discount: 0.99}}"
    )
    config = load_text(tmp_path, text, "gconfig.n_samples=1")
    assert (config.critic.path, config.critic.optimizer.lr, config.actor.optimizer.lr) == ("a/b", 1e-3, 2e-4)


def test_renamed_section_works_with_a_notice_and_an_override_wins_over_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("areal.config")
    logger.addHandler(caplog.handler)
    try:
        config = load_text(tmp_path, "rollout: {agent: {timeout_seconds: 5}}", "rollout.openai.timeout_seconds=7")
        assert config.rollout.agent.timeout_seconds == 7
        assert "rollout.openai is an older name of rollout.agent" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    assert load_text(tmp_path, "rollout: {openai: {timeout_seconds: 5}}").rollout.agent.timeout_seconds == 5


def test_both_names_of_a_renamed_section_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two names of one section; keep rollout\.agent"):
        load_text(tmp_path, "rollout: {agent: {mode: inline}, openai: {mode: inline}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"seed: [1", "is not valid YAML"),
        (b"seed: 1\nseed: 2\n", "'seed' is given twice"),
        (b"\xff\xfe", "is not valid YAML"),
        (b"- 1\n", "must hold settings as `key: value`, got list"),
    ],
)
def test_broken_file_is_one_clear_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    assert message in refusal("--config", str(path))


def test_missing_file_and_two_files_are_refused(tmp_path: Path) -> None:
    assert (
        refusal("--config", "nowhere.yaml") == "cannot read the config file 'nowhere.yaml': No such file or directory"
    )
    assert refusal("--config", "a", "--config", "b").startswith("--config may be given once, got a and b")


def test_config_survives_the_way_to_plain_values_and_back() -> None:
    config = load("gconfig.stop=[x]", "seed=5", "train_dataset.size=10")
    assert build(GRPOConfig, to_dict(config)) == config


def test_a_users_own_config_class_can_add_settings() -> None:
    @dataclass
    class Extra:
        strength: float = 1.0

    @dataclass
    class MyConfig(GRPOConfig):
        my_param: float = 1.0
        extra: Extra = field(default_factory=Extra)

    config, _ = load_expr_config(["my_param=5.0", "extra.strength=2", "seed=4"], MyConfig)
    assert (config.my_param, config.extra.strength, config.seed) == (5.0, 2.0, 4)


def test_tokenizer_path_is_the_actors_unless_it_is_given() -> None:
    assert load().tokenizer_path == load().actor.path == "builtin:tiny-math"
    assert load("actor.path=some/model").tokenizer_path == "some/model"
    assert load("actor.path=some/model", "tokenizer_path=another").tokenizer_path == "another"
    assert load_expr_config([], SFTConfig)[0].tokenizer_path == "builtin:tiny-math"


def test_sampling_that_cannot_be_learnt_from_is_refused() -> None:
    assert "there is nothing to learn; use a temperature > 0" in refusal("gconfig.greedy=true")
    assert "there is nothing to learn" in refusal("gconfig.temperature=0")
    for backend in ("embedded", "vllm"):
        limited = load(f"rollout.backend={backend}", "gconfig.top_p=0.9", "gconfig.top_k=40")
        assert limited.gconfig.top_k == 40
    for backend, *settings in (["vllm", "gconfig.top_p=0.9"], ["sglang", "gconfig.top_p=0.9", "gconfig.top_k=40"]):
        told = refusal(f"rollout.backend={backend}", *settings)
        assert told.startswith(f"rollout.backend={backend} does not report what top_p and top_k leave to draw from")
    assert "unless top_k is 1 to 1024" in refusal("rollout.backend=vllm", "gconfig.top_k=1025")

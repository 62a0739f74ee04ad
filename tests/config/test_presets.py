"""Presets: they fill in what was left unset and nothing else, say where values come from, and refuse nonsense."""

from pathlib import Path

import pytest

from areal.algorithms.stages import VARIANTS
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.config.algorithm import STAGES
from areal.config.errors import ConfigError
from areal.config.loader import build, to_dict
from areal.config.presets import DEFAULTS, PRESETS, as_text, filled, lines, resolve
from areal.config.training import ActorConfig

CRITIC = ["critic.path=builtin:tiny-math"]


def load(*words: str) -> GRPOConfig:
    return load_expr_config(list(words), GRPOConfig)[0]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*words)
    return str(caught.value)


def test_every_setting_of_a_preset_is_one_of_the_actors() -> None:
    actor = ActorConfig()
    for name in DEFAULTS:
        assert getattr(actor, name) == "preset"
    for preset in PRESETS.values():
        assert preset.values.keys() <= DEFAULTS.keys()


def test_the_names_of_variants_are_those_that_there_are() -> None:
    for setting, variants in VARIANTS.items():
        assert STAGES[setting].choices == tuple(variants)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_its_values_and_the_rest_is_the_default(name: str) -> None:
    config = load(f"actor.algorithm={name}", "ref.path=x", *(CRITIC if name == "ppo" else []))
    expected = {**DEFAULTS, **PRESETS[name].values}
    expected["loss_length"] = expected["loss_length"] or config.gconfig.max_new_tokens
    assert {setting: getattr(config.algorithm, setting) for setting in DEFAULTS} == expected


def test_what_the_user_set_stays_even_where_it_is_the_default() -> None:
    config = load("actor.algorithm=dapo", "actor.eps_clip_higher=null", "actor.adv_norm=none")
    assert (config.algorithm.eps_clip_higher, config.algorithm.adv_norm) == (None, "none")
    assert config.algorithm.overlong_share == 0.2
    assert config.algorithm.clips == (0.2, 0.2)


def test_without_a_name_stale_samples_are_decoupled_and_others_are_not() -> None:
    fresh, stale = load("rollout.max_head_offpolicyness=0"), load("rollout.max_head_offpolicyness=1")
    assert (fresh.algorithm.name, fresh.algorithm.use_decoupled_loss) == ("default", False)
    assert (stale.algorithm.name, stale.algorithm.use_decoupled_loss) == ("decoupled", True)
    assert not load("actor.use_decoupled_loss=false").algorithm.use_decoupled_loss
    assert not load("actor.algorithm=grpo").algorithm.use_decoupled_loss  # a name is what it says


def test_today_s_default_is_the_preset_default() -> None:
    """What a run without a name computed before there were presets."""
    algorithm = load("rollout.max_head_offpolicyness=0").algorithm
    assert (algorithm.objective, algorithm.eps_clip, algorithm.eps_clip_higher) == ("clip", 0.2, None)
    assert (algorithm.dual_clip, algorithm.group_baseline, algorithm.adv_norm) == (3.0, "mean", "none")
    assert (algorithm.loss_norm, algorithm.kl_ctl, algorithm.behave_imp_weight_cap) == ("token", 0.0, 5.0)


def test_decoupled_composes_with_the_clipped_ones() -> None:
    algorithm = load("actor.algorithm=dapo+decoupled").algorithm
    assert (algorithm.name, algorithm.use_decoupled_loss, algorithm.eps_clip_higher) == ("dapo+decoupled", True, 0.28)
    for name in ("rloo", "cispo", "sapo", "m2po", "decoupled"):
        assert f"got '{name}+decoupled'; use {name}" in refusal(f"actor.algorithm={name}+decoupled")


def test_the_penalty_of_a_preset_needs_a_reference_and_asks_for_none() -> None:
    assert load("actor.algorithm=grpo").algorithm.kl_ctl == 0
    assert load("actor.algorithm=grpo", "ref.path=builtin:tiny-math").algorithm.kl_ctl == 0.04
    assert load("actor.algorithm=grpo", "ref.path=builtin:tiny-math", "actor.kl_ctl=0").algorithm.kl_ctl == 0


def test_the_table_says_where_values_come_from_and_what_was_overridden() -> None:
    resolved = load("actor.algorithm=dapo", "actor.eps_clip_higher=0.3", "actor.dual_clip=3.0").resolved
    table = {each.name: (each.value, each.origin, each.instead_of) for each in resolved.table}
    assert table["eps_clip"] == (0.2, "preset", "")
    assert table["eps_clip_higher"] == (0.3, "you", "0.28")
    assert table["dual_clip"] == (3.0, "you", "null")
    assert table["ratio"] == ("token", "default", "")
    printed = lines(resolved)
    assert printed[0] == "algorithm dapo"
    assert any(line.split() == ["eps_clip_higher", "0.3", "you,", "not", "0.28"] for line in printed)
    assert not any("ratio" in line for line in printed)
    unnamed = len(resolved.table) - (len(printed) - 2)
    assert printed[-1] == f"  {unnamed} others have their defaults; config.yaml of the run has all"
    assert max(map(len, printed)) <= 80


def test_a_filled_actor_means_the_same_and_leaves_nothing_open(tmp_path: Path) -> None:
    config = load("actor.algorithm=gspo", "actor.eps_clip=0.01")
    actor = filled(config.actor, config.algorithm)
    assert "preset" not in to_dict(actor).values()
    again = build(ActorConfig, to_dict(actor))
    assert resolve(again, stale=True).algorithm == config.algorithm


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor.algorithm=grop"], "actor.algorithm must be one of default, decoupled, grpo,"),
        (["actor.algorithm=ppo"], "actor.algorithm=ppo takes advantages against a critic; set critic.path"),
        (["actor.algorithm=grpo", *CRITIC], "critic.path=builtin:tiny-math takes advantages against values"),
        (
            ["actor.algorithm=rloo", "gconfig.n_samples=1"],
            "actor.group_baseline=leave_one_out with gconfig.",
        ),
        (["actor.algorithm=grpo", "gconfig.n_samples=1"], "actor.adv_norm=group needs gconfig.n_samples > 1"),
        (["actor.dynamic_sampling=true", "gconfig.n_samples=1", "actor.group_baseline=none"], "actor.dynamic_sampling"),
        (["actor.algorithm=cispo", "actor.ratio=sequence"], "actor.ratio=sequence has no meaning for objective=cispo"),
        (["actor.kl=k1", "actor.kl_ctl=0.1", "ref.path=x"], "actor.kl=k1 in the loss has a gradient that is 0 on"),
        (["actor.kl_in=reward", "actor.kl_ctl=0.1", "ref.path=x"], "actor.kl_in=reward needs kl=k1, got k3"),
        (["actor.second_moment=0.1", "actor.algorithm=grpo"], "actor.second_moment=0.1 is part of the correction"),
        (["actor.behave_imp_weight_floor=6"], "actor.behave_imp_weight_floor=6.0 must lie below"),
        (["actor.objective=clap"], "actor.objective must be one of clip, importance, cispo, sapo, reinforce, or a"),
        (["actor.objective=no_such_module.function"], "actor.objective 'no_such_module.function' cannot be imported"),
        (["actor.objective=my_stages.missing"], "actor.objective 'my_stages.missing' cannot be imported: Attribute"),
        (
            ["actor.objective=my_stages.NOT_A_FUNCTION"],
            "actor.objective must name a function NOT_A_FUNCTION(",
        ),
        (["actor.objective=my_stages.too_few"], "actor.objective must name a function too_few(logprobs_N, log_ratio_N"),
        (["actor.eps_clip=2"], "actor.eps_clip must lie in (0, 1], got 2.0; use 1 for no bound below"),
        (["actor.eps_clip=x"], "actor.eps_clip must be preset or a finite number, got 'x'"),
        (["actor.dual_clip=x"], "actor.dual_clip must be preset, null or a finite number, got 'x'"),
        (["actor.entropy_coef=-1"], "actor.entropy_coef must be >= 0 and finite, got -1.0"),
    ],
)
def test_what_means_nothing_is_refused_with_the_remedy(words: list[str], message: str) -> None:
    assert refusal(*words).startswith(message)


@pytest.mark.parametrize(
    "setting",
    ["objective=my_stages.halved", "advantage=my_stages.first_half", "ratio=my_stages.twice",
     "correction=my_stages.even", "kl=my_stages.squared", "loss_norm=my_stages.by_ten"],
)  # fmt: skip
def test_every_stage_takes_a_function_of_the_users(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert getattr(load(f"actor.{setting}").algorithm, name) == value


def test_the_page_has_the_presets_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        values = ", ".join(f"`{setting}` {as_text(value)}" for setting, value in preset.values.items()) or "–"
        assert f"| `{name}` | {preset.paper} | {values} |" in page


def test_the_page_has_every_stage_with_its_parameters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for setting, stage in STAGES.items():
        assert f"| `{setting}` | `({', '.join(stage.parameters)})` |" in page

import json
from pathlib import Path
from typing import Any

import pytest

from areal.config.experiment import DPOConfig, GRPOConfig, RewardConfig, SFTConfig
from areal.config.loader import build, to_dict
from areal.config.reference import json_schema, settings
from areal.config.yaml import read_mapping

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in ROOT.glob("examples/*/*.yaml") if path.parent.name != "simulation")


KINDS = [GRPOConfig, SFTConfig, DPOConfig, RewardConfig]
ON_PAIRS = {"dpo": DPOConfig, "reward_model": RewardConfig}


def errors(values: Any, config_class: type[Any] = GRPOConfig) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft7Validator(json_schema(config_class))
    return [error.message for error in validator.iter_errors(values)]


@pytest.mark.parametrize("config_class", KINDS)
def test_every_setting_has_a_meaning_and_its_default_is_what_the_loader_takes(config_class: type[Any]) -> None:
    for setting in settings(config_class):
        assert setting.meaning, f"{setting.name} needs a text below its field"
        nested: Any = setting.default
        for name in reversed(setting.name.split(".")):
            nested = {name: nested}
        build(config_class, nested)


def test_settings_are_those_of_the_config_and_no_others() -> None:
    def names(values: dict[str, Any], prefix: str = "") -> list[str]:
        below = [(f"{prefix}{name}", value) for name, value in values.items()]
        return [
            each
            for dotted, value in below
            for each in (names(value, f"{dotted}.") if isinstance(value, dict) else [dotted])
        ]

    assert [setting.name for setting in settings(GRPOConfig)] == names(to_dict(GRPOConfig()))


@pytest.mark.parametrize(
    ("name", "kind", "default", "unit"),
    [
        ("gconfig.n_samples", "whole number", 8, "episodes"),  # GRPO's own default
        ("rollout.agent.timeout_seconds", "number", 600.0, "seconds"),
        ("rollout.memory_gib", "number", 0.0, "GiB"),  # of a base class
        ("actor.recompute_logprob", "true, false or auto", "auto", ""),
        ("store.keep_tokens", "all, none or whole number", "all", ""),
        ("scheduler.slurm_arguments", "list of texts", [], ""),
        ("trial_name", "text or null", None, ""),
    ],
)
def test_setting_is_described(name: str, kind: str, default: Any, unit: str) -> None:
    (found,) = [setting for setting in settings(GRPOConfig) if setting.name == name]
    assert (found.type, found.default, found.unit) == (kind, default, unit)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name + "/" + path.name)
def test_shipped_files_fit_the_schema(path: Path) -> None:
    kind = ON_PAIRS.get(path.parent.name, GRPOConfig) if path.name == "config.yaml" else GRPOConfig
    assert errors(read_mapping(str(path)), kind) == []


@pytest.mark.parametrize("config_class", KINDS)
def test_what_a_run_writes_down_fits_the_schema(config_class: type[Any]) -> None:
    assert errors(json.loads(json.dumps(to_dict(config_class()))), config_class) == []


@pytest.mark.parametrize(
    "values",
    [
        {"sede": 1},
        {"seed": "one"},
        {"seed": 1.5},
        {"rollout": {"when_stale": "never"}},
        {"rollout": {"agent": {"timeout": 3}}},
        {"actor": {"kl_ctl": None}},
        {"gconfig": {"stop": "x"}},
        {"store": {"keep_tokens": "some"}},
    ],
)
def test_schema_refuses_what_the_loader_refuses(values: dict[str, Any]) -> None:
    assert errors(values)
    with pytest.raises(ValueError, match=r"must be|unknown setting"):
        build(GRPOConfig, values)


def test_older_name_of_a_section_fits_the_schema() -> None:
    assert errors({"rollout": {"openai": {"mode": "subproc"}}, "actor": None}) == []

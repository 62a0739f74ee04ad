"""Names and signatures that users of the interface rely on. A row here never goes away; new ones are added."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest

PROMISED = [
    ("areal", "PPOTrainer"),
    ("areal", "SFTTrainer"),
    ("areal", "workflow_context"),
    ("areal", "__version__"),
    ("areal.api.workflow_api", "RolloutWorkflow"),
    ("areal.api.workflow_api", "AgentWorkflow"),
    ("areal.api.reward_api", "AsyncRewardWrapper"),
    ("areal.api.engine_api", "InferenceEngine"),
    ("areal.api.engine_api", "TrainEngine"),
    ("areal.api.io_struct", "ModelRequest"),
    ("areal.api.io_struct", "ModelResponse"),
    ("areal.api.cli_args", "GenerationHyperparameters"),
    ("areal.api.cli_args", "GRPOConfig"),
    ("areal.api.cli_args", "PPOConfig"),
    ("areal.api.cli_args", "load_expr_config"),
    ("areal.infra", "workflow_context"),
    ("areal.utils", "logging"),
    ("areal.utils.logging", "getLogger"),
    ("areal.utils", "stats_tracker"),
    ("areal.utils.data", "concat_padded_tensors"),
    ("areal.utils.hf_utils", "load_hf_processor"),
    ("areal.utils.hf_utils", "load_hf_tokenizer"),
    ("areal.utils.images", "encode_image"),
    ("areal.proxy", "ArealOpenAI"),
    ("areal.workflow", "MultiTurnWorkflow"),
    ("areal.workflow.multi_turn", "MultiTurnWorkflow"),
    ("areal.workflow", "RLVRWorkflow"),
    ("areal.workflow.rlvr", "RLVRWorkflow"),
    ("areal.workflow", "VisionRLVRWorkflow"),
    ("areal.workflow.vision_rlvr", "VisionRLVRWorkflow"),
    ("areal.workflow.openai.math_agent", "MathAgent"),
    ("areal.workflow.openai.math_agent", "MultiTurnMathAgent"),
    ("areal.workflow.openai.math_agent", "MathToolAgent"),
    ("areal.dataset", "get_custom_dataset"),
]

SIGNATURES = [
    ("areal.PPOTrainer", ["config", "train_dataset=None", "valid_dataset=None"]),
    (
        "areal.PPOTrainer.train",
        [
            "self",
            "workflow",
            "eval_workflow=None",
            "workflow_kwargs=None",
            "eval_workflow_kwargs=None",
            "dynamic_filter_fn=None",
        ],
    ),
    ("areal.api.workflow_api.RolloutWorkflow.arun_episode", ["self", "engine", "data"]),
    ("areal.api.workflow_api.AgentWorkflow.run", ["self", "data", "**extra_kwargs"]),
    (
        "areal.api.reward_api.AsyncRewardWrapper",
        ["reward_fn", "timeout_seconds=15", "max_workers=None", "max_retries=0"],
    ),
    ("areal.api.io_struct.ModelRequest", ["rid", "input_ids", "gconfig", "tokenizer=None"]),
    ("areal.api.engine_api.InferenceEngine.agenerate", ["self", "req"]),
    ("areal.api.cli_args.load_expr_config", ["argv", "config_class"]),
    ("areal.api.cli_args.GenerationHyperparameters.new", ["self", "**overrides"]),
    ("areal.api.cli_args.GenerationHyperparameters.new_with_stop_and_pad_token_ids", ["self", "tokenizer"]),
    ("areal.infra.workflow_context.get", []),
    ("areal.infra.workflow_context.stat_scope", []),
    ("areal.infra.workflow_context.get_aiohttp_session", []),
    ("areal.infra.workflow_context.get_httpx_client", []),
]
"""The opening parameters of each, with its default where one is promised; more may follow if they have defaults."""

AWAITABLE = [
    "areal.api.workflow_api.RolloutWorkflow.arun_episode",
    "areal.api.workflow_api.AgentWorkflow.run",
    "areal.api.engine_api.InferenceEngine.agenerate",
    "areal.infra.workflow_context.get_aiohttp_session",
    "areal.infra.workflow_context.get_httpx_client",
    "areal.workflow.MultiTurnWorkflow.arun_episode",
    "areal.workflow.RLVRWorkflow.arun_episode",
    "areal.workflow.openai.math_agent.MathAgent.run",
    "areal.workflow.openai.math_agent.MultiTurnMathAgent.run",
    "areal.workflow.openai.math_agent.MathToolAgent.run",
]

RESPONSE_NAMES = ["input_tokens", "output_tokens", "output_logprobs", "output_versions", "stop_reason"]

WHERE_USERS_LOOK = [
    "experiment_name",
    "trial_name",
    "seed",
    "total_train_epochs",
    "total_train_steps",
    "tokenizer_path",
    "gconfig",
    "rollout",
    "rollout.max_head_offpolicyness",
    "rollout.max_concurrent_rollouts",
    "rollout.agent.mode",
    "rollout.agent.timeout_seconds",
    "rollout.agent.turn_discount",
    "rollout.agent.export_style",
    "actor.path",
    "train_dataset.path",
    "valid_dataset.path",
    "saver",
    "evaluator.freq_steps",
    "recover",
    "scheduler.type",
]


def find(dotted: str) -> Any:
    """The object at the end of a dotted name, through modules and then attributes."""
    parts = dotted.split(".")
    module = importlib.import_module(parts[0])
    found: Any = module
    for i, part in enumerate(parts[1:], 1):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)
    return found


def needs_agents_extra(dotted: str) -> bool:
    return "MathToolAgent" in dotted and importlib.util.find_spec("agents") is None


@pytest.mark.parametrize(("module", "name"), PROMISED)
def test_promised_name_imports(module: str, name: str) -> None:
    if needs_agents_extra(name):
        pytest.skip("MathToolAgent needs the agents extra: pip install areal-agents[agents]")
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize(("dotted", "promised"), SIGNATURES)
def test_promised_signature_holds(dotted: str, promised: list[str]) -> None:
    parameters = list(inspect.signature(find(dotted)).parameters.values())
    assert [_spelled(each, words) for each, words in zip(parameters, promised, strict=False)] == promised
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for extra in parameters[len(promised) :]:
        assert extra.default is not inspect.Parameter.empty or extra.kind in optional, f"{extra} has no default"


def _spelled(parameter: inspect.Parameter, promised: str) -> str:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if "=" not in promised:
        return parameter.name
    default = parameter.default
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"{parameter.name}={default}"


@pytest.mark.parametrize("dotted", AWAITABLE)
def test_promised_coroutine_is_one(dotted: str) -> None:
    if needs_agents_extra(dotted):
        pytest.skip("MathToolAgent needs the agents extra: pip install areal-agents[agents]")
    assert inspect.iscoroutinefunction(find(dotted))


def test_trainer_is_a_context_manager() -> None:
    trainer = find("areal.PPOTrainer")
    assert hasattr(trainer, "__enter__")
    assert hasattr(trainer, "__exit__")


def test_get_custom_dataset_takes_the_promised_keywords() -> None:
    inspect.signature(find("areal.dataset.get_custom_dataset")).bind(split="train", dataset_config=None, tokenizer=None)


def test_model_response_holds_the_promised_fields() -> None:
    response = find("areal.api.io_struct.ModelResponse")([1], [2], [-0.5], [0], "stop")
    for name in RESPONSE_NAMES:
        assert hasattr(response, name)


@pytest.mark.parametrize("dotted", WHERE_USERS_LOOK)
def test_setting_is_where_users_look(dotted: str) -> None:
    here = find("areal.api.cli_args.GRPOConfig")()
    for part in dotted.split("."):
        assert hasattr(here, part)
        here = getattr(here, part)


@pytest.mark.slow
def test_areal_refuses_unknown_names_and_loads_no_torch() -> None:
    code = "import sys, areal\nassert areal.__version__\nassert not hasattr(areal, 'Nothing')\n"
    code += "import areal.api.cli_args\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""Tokenizers for tests: one byte-level vocabulary, and chat templates in the styles of the model families."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERMES_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}"""

CHATML = (
    """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
"""
    + HERMES_CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN3 = (
    """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set last.question = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1] %}
{%- set thought = message.reasoning_content or '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if thought and loop.index0 > last.question %}{{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}{%- endif %}
{{- content.lstrip('\\n') }}
"""
    + HERMES_CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN3_CODER = CHATML.replace(
    HERMES_CALLS,
    """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
)

LLAMA3 = """\
{{- '<|begin|>' }}
{%- if tools %}
{{- '<|header|>system<|end_header|>\\n\\nAnswer {"name": function, "parameters": object} to call.\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|header|>assistant<|end_header|>\\n\\n' }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '; ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}
{{- '<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|header|>ipython<|end_header|>\\n\\n' + message.content + '<|eot|>' }}
{%- else %}
{{- '<|header|>' + message.role + '<|end_header|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}"""

GEMMA = """\
{{- '<|begin|>' }}
{%- set first = namespace(words='', turns=messages) %}
{%- if messages[0].role == 'system' %}
{%- set first.words = messages[0].content + '\\n\\n' %}{%- set first.turns = messages[1:] %}
{%- endif %}
{%- for message in first.turns %}
{%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must alternate') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else 'user' %}
{{- '<start_of_turn>' + role + '\\n' + (first.words if loop.first else '') + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """\
{{- '<|begin|>' }}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('call ids must have nine characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + ' </s>' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('call ids must have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}
{%- if tools and loop.index0 == last.question %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + ' [/INST]' }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """\
{{- '<|begin|>' }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] | trim }}
{%- if message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' + ('' if loop.last else '\\n') }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<|eos|>' }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- else %}{{- '<｜' + message.role + '｜>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

DEEPSEEK_R1 = DEEPSEEK.replace("{{- '<｜Assistant｜>' }}{%- endif %}", "{{- '<｜Assistant｜><think>\\n' }}{%- endif %}")


@dataclass(frozen=True)
class Style:
    template: str
    end: str
    calls: str | None
    """How it writes tool calls; None = it knows no tools."""
    thinks: bool = False
    opens_thinking: bool = False
    """The generation prompt opens the thinking."""


STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", "hermes"),
    "qwen3": Style(QWEN3, "<|im_end|>", "hermes", thinks=True),
    "qwen3_coder": Style(QWEN3_CODER, "<|im_end|>", "qwen3_coder"),
    "llama3": Style(LLAMA3, "<|eot|>", "llama3"),
    "gemma": Style(GEMMA, "<end_of_turn>", None),
    "mistral": Style(MISTRAL, "</s>", "mistral"),
    "deepseek": Style(DEEPSEEK, "<|eos|>", "deepseek", thinks=True),
    "deepseek_r1": Style(DEEPSEEK_R1, "<|eos|>", "deepseek", thinks=True, opens_thinking=True),
}

PLAIN_STYLES = [name for name, style in STYLES.items() if not style.opens_thinking]
"""Those whose answers are text from their first token on."""

SPECIALS = [
    *("<|pad|>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<|header|>", "<|end_header|>", "<|eot|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "</s>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|eos|>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
]

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("a", "n"), ("an", "s"), ("1", "2"), ("Ġ", "t")]


@cache
def chat_tokenizer(style: str) -> Any:
    """Bytes, a few merges so that the same text has several tokenisations, and one style's template."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=STYLES[style].end, pad_token="<|pad|>")
    tokenizer.chat_template = STYLES[style].template
    return tokenizer

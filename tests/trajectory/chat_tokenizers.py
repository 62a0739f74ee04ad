"""Tokenizers for tests: one byte-level vocabulary, chat templates in the styles of five model families."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 < last.user %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{{- '<|header|>' + message.role + '<|end_header|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}"""

GEMMA = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- ' ' + message.content + ' </s>' }}
{%- else %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- endif %}
{%- endfor %}"""

CHATML_MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
OTHER_MARKS = [
    "<|header|>",
    "<|end_header|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "</s>",
]
SPECIALS = ["<|pad|>", "<|begin|>", *CHATML_MARKS, *OTHER_MARKS]

ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
}

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("a", "n"), ("an", "s"), ("1", "2"), ("Ġ", "t")]


@cache
def chat_tokenizer(style: str) -> Any:
    """Bytes, a few merges so that the same text has several tokenisations, and one style's template."""
    template, end = ENDS[style]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(symbols)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer

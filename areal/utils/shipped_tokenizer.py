"""The tokenizers that ship with this package, opened without transformers, which takes half a second to load.

Only a copy of one of them, file by file, is opened this way (`shipped_name`): for those few vocabularies and templates
every answer given here is tested to be transformers' own. Whatever else is asked or changed goes to transformers'
tokenizer, which is opened then and answers everything from there on.
"""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("builtin_tokenizers")
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
VOCABULARY = "tokenizer.json"
NOTED_WHEN_LOADED = ("is_local", "local_files_only")
"""What transformers adds to the settings when it saves a tokenizer, about how that one was loaded."""
OTHER_SOURCES = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
"""Where else transformers looks for what a tokenizer is."""
PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def shipped_name(directory: Path) -> str | None:
    """The name of the tokenizer that the directory has a copy of; None = it has another."""
    if any((directory / name).exists() for name in OTHER_SOURCES):
        return None
    files = _files(directory)
    return next((each.name for each in sorted(SHIPPED.iterdir()) if files == _files(each)), None) if files else None


def _files(directory: Path) -> tuple[Any, bytes, bytes] | None:
    """Settings, template and vocabulary; None if one of them is not there or cannot be read."""
    try:
        settings = json.loads((directory / SETTINGS).read_bytes())
        template, vocabulary = (directory / TEMPLATE).read_bytes(), (directory / VOCABULARY).read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    return {key: settings[key] for key in settings if key not in NOTED_WHEN_LOADED}, template, vocabulary


class ShippedTokenizer:
    """Answers as transformers' tokenizer of the same files does. Safe to use from several threads."""

    def __init__(self, name: str, path: str, full: Any = None) -> None:
        """`path` is where the user found the copy; `full` = transformers' tokenizer, if there is one already."""
        from tokenizers import Tokenizer

        directory = SHIPPED / name
        own = vars(self)  # an assignment would be the user's
        own["_name"], own["_path"], own["_full"] = name, path, full
        own["_lock"] = threading.RLock()
        own["_settings"] = json.loads((directory / SETTINGS).read_bytes())
        own["_template"] = (directory / TEMPLATE).read_text(encoding="utf-8")
        own["_core"] = Tokenizer.from_file(str(directory / VOCABULARY))
        own["_compiled"] = None

    # What this package and most agents ask.

    @property
    def name_or_path(self) -> str:
        return self._path if self._full is None else str(self._full.name_or_path)

    @property
    def chat_template(self) -> Any:
        return self._template if self._full is None else self._full.chat_template

    @property
    def backend_tokenizer(self) -> Any:
        return self._core if self._full is None else self._full.backend_tokenizer

    @property
    def model_max_length(self) -> Any:
        return self._settings["model_max_length"] if self._full is None else self._full.model_max_length

    @property
    def eos_token(self) -> Any:
        return self._settings["eos_token"] if self._full is None else self._full.eos_token

    @property
    def pad_token(self) -> Any:
        return self._settings["pad_token"] if self._full is None else self._full.pad_token

    @property
    def eos_token_id(self) -> Any:
        return self._core.token_to_id(self.eos_token) if self._full is None else self._full.eos_token_id

    @property
    def pad_token_id(self) -> Any:
        return self._core.token_to_id(self.pad_token) if self._full is None else self._full.pad_token_id

    @property
    def all_special_ids(self) -> Any:
        return [self.eos_token_id, self.pad_token_id] if self._full is None else self._full.all_special_ids

    @property
    def added_tokens_decoder(self) -> Any:
        return self._core.get_added_tokens_decoder() if self._full is None else self._full.added_tokens_decoder

    def __len__(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True)) if self._full is None else len(self._full)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if self._full is not None or not _is_all(tokens, str):
            return self._opened().convert_tokens_to_ids(tokens)
        return self._core.token_to_id(tokens) if type(tokens) is str else [self._core.token_to_id(t) for t in tokens]

    def convert_ids_to_tokens(self, ids: Any, *args: Any, **options: Any) -> Any:
        if self._full is not None or args or options or not _is_all(ids, int):
            return self._opened().convert_ids_to_tokens(ids, *args, **options)
        return self._core.id_to_token(ids) if type(ids) is int else [self._core.id_to_token(n) for n in ids]

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        if self._full is None and type(text) is str and not args and not options:
            ids = self._core.encode(text, add_special_tokens=add_special_tokens).ids
            if len(ids) <= self.model_max_length:  # transformers warns of longer ones
                return ids
        return self._opened().encode(text, *args, add_special_tokens=add_special_tokens, **options)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        plain = options in ({}, {"clean_up_tokenization_spaces": False}, {"clean_up_tokenization_spaces": None})
        if self._full is not None or not plain or not _is_all(token_ids, int):
            return self._opened().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        ids = [token_ids] if type(token_ids) is int else token_ids
        return self._core.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *args: Any,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The text, or with `tokenize` its ids in a plain list."""
        ours = self._full is None and not (args or options or (return_dict and tokenize))
        if ours and _is_conversation(conversation) and _are_tools(tools):
            rendered = self._render(conversation, tools, add_generation_prompt)
            return self.encode(rendered, add_special_tokens=False) if tokenize else rendered
        return self._opened().apply_chat_template(
            conversation,
            tools,
            *args,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=return_dict,
            **options,
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> tuple[str, ...]:
        """Write the files; returns where they are."""
        if self._full is not None or args or options or Path(save_directory).is_file():
            return tuple(self._opened().save_pretrained(save_directory, *args, **options))
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        files = [SHIPPED / self._name / name for name in (SETTINGS, TEMPLATE, VOCABULARY)]
        return tuple(shutil.copyfile(file, Path(save_directory) / file.name).as_posix() for file in files)

    # Everything else is transformers'.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python's own questions, which it asks of any object
            raise AttributeError(name)
        return getattr(self._opened(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._opened(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._opened(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        """What isinstance() asks."""
        return type(self._opened())

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._opened()(*args, **options)

    def __repr__(self) -> str:
        return repr(self._opened())

    def __dir__(self) -> list[str]:
        return dir(self._opened())

    def __reduce__(self) -> Any:
        return ShippedTokenizer, (self._name, self._path, self._full)

    def _opened(self) -> Any:
        """transformers' tokenizer. It is read from this package's files: the user's may be gone by now."""
        with self._lock:
            if self._full is None:
                from transformers import PreTrainedTokenizerFast

                full = PreTrainedTokenizerFast.from_pretrained(str(SHIPPED / self._name))
                full.name_or_path = self._path
                vars(self)["_full"] = full
            return self._full

    def _render(self, conversation: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if self._compiled is None:
            vars(self)["_compiled"] = _compiled(self._template)
        messages = [{key: value for key, value in each.items() if value is not None} for each in conversation]
        return str(self._compiled.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt))


def _compiled(template: str) -> Any:
    """The template in an environment that does for ours what transformers' does."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def _is_all(value: Any, kind: type) -> bool:
    """Whether it is one of that very type, or a list of such."""
    return type(value) is kind or (type(value) is list and all(type(each) is kind for each in value))


def _is_conversation(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(each) is dict and _is_plain(each) for each in value)


def _are_tools(value: Any) -> bool:
    return value is None or (type(value) is list and all(type(each) is dict and _is_plain(each) for each in value))


def _is_plain(value: Any) -> bool:
    """Whether it is made of JSON's types and of nothing that only resembles them."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return True
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return kind is list and all(map(_is_plain, value))

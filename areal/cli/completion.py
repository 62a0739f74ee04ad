"""`areal completion SHELL`: a script that completes verbs, options, their choices, and names of settings.

The script is static, made from the declared verbs and settings, so that Tab starts no Python and needs no library.
Where nothing is known, shells complete names of files as they always do.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from areal.cli.parsers import verb_parser
from areal.cli.verbs import VERBS
from areal.config.experiment import GRPOConfig
from areal.config.reference import as_yaml, settings


@dataclass(frozen=True)
class Option:
    names: list[str]
    help: str
    choices: list[str]
    """Empty = any word."""
    takes_word: bool


@dataclass(frozen=True)
class Completed:
    """What can follow a verb."""

    verb: str
    summary: str
    options: list[Option]
    choices: list[str]
    """Of its first word."""
    takes_settings: bool


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](completed()), end="")
    return 0


def completed() -> list[Completed]:
    return [_completed(name) for name in VERBS]


def _completed(name: str) -> Completed:
    options: list[Option] = []
    choices: list[str] = []
    takes_settings = False
    for action in verb_parser(name, VERBS[name])._actions:
        known = [str(each) for each in action.choices or ()]
        if action.option_strings:
            takes_word = action.nargs != 0
            options.append(Option(list(action.option_strings), action.help or "", known, takes_word))
        else:
            choices = choices or known
            takes_settings |= action.dest == "overrides"
    return Completed(name, VERBS[name].summary, options, choices, takes_settings)


def _setting_words() -> tuple[str, str]:
    """`a.b=` of every setting, and `a.b=c` of every choice of those that have some."""
    known = settings(GRPOConfig)
    values = [f"{each.name}={as_yaml(choice)}" for each in known for choice in each.choices]
    return " ".join(f"{each.name}=" for each in known), " ".join(values)


def _cases(verbs: list[Completed], line: str) -> str:
    """A line of a `case` for each option that has choices: verb, its names, the choices."""
    found = [(each.verb, option) for each in verbs for option in each.options if option.choices]
    return "".join(
        line.format(pattern="|".join(f"{verb}:{name}" for name in option.names), choices=" ".join(option.choices))
        for verb, option in found
    )


def bash_script(verbs: list[Completed]) -> str:
    names, values = _setting_words()
    options = "".join(
        f'    {each.verb}) words="{" ".join(name for option in each.options for name in option.names)}" ;;\n'
        for each in verbs
    )
    choices = _cases(verbs, '    {pattern}) words="{choices}" ;;\n')
    first = "".join(f'    {each.verb}) words="{" ".join(each.choices)}" ;;\n' for each in verbs if each.choices)
    with_settings = "|".join(each.verb for each in verbs if each.takes_settings)
    return f"""\
# Completes `areal` in bash. Made by `areal completion bash`.
_areal() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" words="" verb="${{COMP_WORDS[1]}}"
  local word="${{line##* }}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if ((COMP_CWORD == 1)); then
    words="{" ".join(each.verb for each in verbs)} --help --version"
  elif [[ $word == -* ]]; then
    case "$verb" in
{options}    esac
  else
    case "$verb:$before" in
{choices}    esac
    if [[ -z $words ]] && ((COMP_CWORD == 2)); then
      case "$verb" in
{first}      esac
    fi
    if [[ -z $words && $before != -* ]]; then
      case "$verb" in
    {with_settings}) if [[ $word == *=* ]]; then words="{values}"; else words="{names}"; fi ;;
      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  # What bash takes for several words, it wants completed from the last of them on.
  local known="${{word%"${{word##*[=:]}}"}}"
  COMPREPLY=("${{COMPREPLY[@]#"$known"}}")
}}
complete -o bashdefault -o default -F _areal areal
"""


def zsh_script(verbs: list[Completed]) -> str:
    names, values = _setting_words()
    described = "\n    ".join(_quoted(f"{each.verb}:{each.summary}") for each in verbs)
    options = "".join(
        f"    {each.verb}) described=(\n      "
        + "\n      ".join(
            _quoted(f"{name}:{option.help.replace(':', chr(92) + ':')}")
            for option in each.options
            for name in option.names
        )
        + " ) ;;\n"
        for each in verbs
    )
    choices = _cases(verbs, "    ({pattern}) compadd -- {choices}; return ;;\n")
    first = "".join(
        f"    {each.verb}) compadd -- {' '.join(each.choices)}; return ;;\n" for each in verbs if each.choices
    )
    with_settings = "|".join(each.verb for each in verbs if each.takes_settings)
    return f"""\
#compdef areal
# Completes `areal` in zsh. Made by `areal completion zsh`.
_areal() {{
  local -a described
  if ((CURRENT == 2)); then
    described=(
    {described} )
    _describe verb described
    return
  fi
  if [[ ${{words[CURRENT]}} == -* ]]; then
    case ${{words[2]}} in
{options}    esac
    _describe option described
    return
  fi
  case "${{words[2]}}:${{words[CURRENT-1]}}" in
{choices}  esac
  if ((CURRENT == 3)); then
    case ${{words[2]}} in
{first}    esac
  fi
  case ${{words[2]}} in
    ({with_settings})
      if [[ ${{words[CURRENT]}} == *=* ]]; then
        compadd -- {values}
      elif [[ ${{words[CURRENT-1]}} != -* ]]; then
        compadd -S '' -- {names}
      fi ;;
  esac
  _files
}}
if [[ ${{funcstack[1]}} == _areal ]]; then _areal "$@"; else compdef _areal areal; fi
"""


def fish_script(verbs: list[Completed]) -> str:
    names, values = _setting_words()
    lines = ["# Completes `areal` in fish. Made by `areal completion fish`."]
    for each in verbs:
        lines.append(f"complete -c areal -f -n __fish_use_subcommand -a {each.verb} -d {_quoted(each.summary)}")
        after = f"complete -c areal -n '__fish_seen_subcommand_from {each.verb}'"
        for option in each.options:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            word = (
                f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r" if option.takes_word else ""
            )
            lines.append(f"{after} {flags}{word} -d {_quoted(option.help)}")
        if each.choices:
            lines.append(f"{after} -f -a {_quoted(' '.join(each.choices))}")
        if each.takes_settings:
            lines.append(f"{after} -a {_quoted(f'{names} {values}')}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """For zsh and fish: neither takes what is in single quotes for anything else."""
    return "'" + text.replace("'", "’") + "'"


SCRIPTS: dict[str, Callable[[list[Completed]], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}

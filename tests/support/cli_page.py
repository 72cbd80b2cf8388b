"""The page docs/reference/cli.md, made from the parsers of the command `kvtier`."""

import argparse
import re
from collections.abc import Iterator

from page_text import bullet, paragraph

from kvtier.cli.main import build_parser

INTRODUCTION = """# Commands

This page lists all commands and options of `kvtier`. In a terminal, `kvtier COMMAND --help` and `kvtier help COMMAND`
print the same. An error is one line on stderr that says what to do. It ends the command with exit status 2.

This page is generated from the command's parsers by `make reference`.
"""


def cli_page() -> str:
    """Return the page."""
    parser = build_parser()
    found = list(commands_of(parser))
    first: dict[str, str] = {}  # the first command with each epilog
    for each, _, _ in found:
        first.setdefault(each.epilog or "", each.prog)
    index = "".join(bullet(f"[`{each.prog}`](#{_anchor(each.prog)})", _sentence(help_)) for each, help_, _ in found)
    sections = "".join(_section(each, help_, aliases, first[each.epilog or ""]) for each, help_, aliases in found)
    return f"{INTRODUCTION}\n{index}{sections}"


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str, list[str]]]:
    """The parsers of all commands and subcommands in order, each with its line in the help and its other names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._get_subactions()}
            for name, command in action.choices.items():
                if name in helps:
                    aliases = [other for other, same in action.choices.items() if same is command and other != name]
                    yield command, helps[name], aliases
                    yield from commands_of(command)
                elif name not in _aliases(action):  # a command that the help does not list
                    yield command, "", []


def _aliases(action: "argparse._SubParsersAction[argparse.ArgumentParser]") -> set[str]:
    first: dict[int, str] = {}
    for name, command in action.choices.items():
        first.setdefault(id(command), name)
    return set(action.choices) - set(first.values())


def _section(parser: argparse.ArgumentParser, help_: str, aliases: list[str], with_epilog: str) -> str:
    """Return the section of a command. Its epilog is only in that of *with_epilog*, the first command that has it."""
    parts = [f"\n## `{parser.prog}`\n\n"]
    parts.append(paragraph(_sentence(_filled(parser, parser.description or help_))))
    if aliases:
        parts.append("\n" + paragraph(f"Other names: {', '.join(f'`{name}`' for name in aliases)}."))
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if _is_shown(each)]
        if actions:
            title = {"positional arguments": "arguments"}.get(group.title or "", group.title or "options")
            parts.append(f"\n**{title[:1].upper()}{title[1:]}**\n\n")
            if group.description:
                parts.append(paragraph(_filled(parser, group.description)) + "\n")
            parts += [bullet(_name(each), _sentence(_filled(parser, each.help or "", each))) for each in actions]
    commands = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if commands:
        shown = [f"[`{each.prog}`](#{_anchor(each.prog)})" for each, _, _ in commands_of(parser)]
        parts.append("\n" + paragraph(f"Commands: {', '.join(shown)}."))
    if parser.epilog and with_epilog != parser.prog:
        parts.append(f"\nExamples and exit status: [`{with_epilog}`](#{_anchor(with_epilog)}).\n")
    elif parser.epilog:
        parts.append(f"\n```text\n{_filled(parser, parser.epilog).strip()}\n```\n")
    return "".join(parts)


def _is_shown(action: argparse.Action) -> bool:
    is_help = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not is_help and action.help != argparse.SUPPRESS


def _name(action: argparse.Action) -> str:
    """An option with its short form and its value, such as `-p, --port PORT`."""
    metavar = action.metavar or action.dest.upper()
    if action.choices is not None and action.metavar is None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if action.nargs in ("*", "+"):
        value = f"{value} …"
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(action.option_strings)
    return f"`{names}`" if action.nargs == 0 else f"`{names} {value}`"


def _filled(parser: argparse.ArgumentParser, text: str, action: argparse.Action | None = None) -> str:
    """The text with the values that argparse puts in, such as %(default)s."""
    values = {**vars(action), "prog": parser.prog} if action is not None else {"prog": parser.prog}
    return text % values if action is not None else text.replace("%(prog)s", parser.prog)


def _sentence(text: str) -> str:
    """The text of a help with a capital letter and a full stop, and with names of options as code."""
    text = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", " ".join(text.split()))
    text = re.sub(r"'(kvtier [^']*)'", r"`\1`", text).replace("<", "&lt;").replace("*", r"\*")
    begins_with_value = re.match(r"[\w-]+:", text) is not None  # such as "auto: the checkpoint's"
    first = text[:1] if begins_with_value else text[:1].upper()
    return f"{first}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def _anchor(prog: str) -> str:
    return prog.replace(" ", "-")

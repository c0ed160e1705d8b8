"""The parser of the command line."""

import argparse
from typing import Any


def written_as(option: str) -> dict[str, Any]:
    """Return how a table is written by an option such as header=False; nothing of another one."""
    name, equals, value = option.partition("=")
    if name in ("header", "quoting") and value in ("True", "False"):
        return {name: value == "True"}
    return {name: value.replace("\\t", "\t")} if name == "delimiter" and equals else {}


class Parser(argparse.ArgumentParser):
    """A parser whose options name their defaults."""

    def option(self, name: str, help: str = "", default: Any = None, **more: Any) -> None:
        """Add an option; a default gives the option its type and is named in the help."""
        if default is not None:
            more = {"type": type(default), **more}
            help = f"{help} (default: %(default)s)" if help else "default: %(default)s"
        self.add_argument(name, default=default, help=help, **more)

    def several(self, name: str, metavar: str, help: str) -> None:
        """Add an option that may be repeated; none makes an empty list."""
        self.add_argument(name, action="append", default=[], metavar=metavar, help=help)

    def flag(self, name: str, help: str, **more: Any) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help, **more)

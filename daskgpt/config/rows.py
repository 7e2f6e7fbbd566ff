"""Rows of tables, as configurations name them: a built-in name, or `package.module:ROW` for a row of another module."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from daskgpt.config.errors import refusing, require, require_known

T = TypeVar("T")
SEPARATOR = ":"
ALLOWED = "DASKGPT_MODULES"  # the environment variable with the modules that files may name, separated by commas


def is_from_outside(name: str) -> bool:
    """Return whether a name is that of a row in another module."""
    return SEPARATOR in name


def row_of(name: str, table: Mapping[str, T], where: str, what: str) -> T:
    """Return the row that a configuration names, from a table or from another module, which is imported.

    what     the field of the configuration

    Errors   ValueError for an unknown name, a module that cannot be imported, or one without such a row; TypeError for
             a row of another kind
    """
    if not is_from_outside(name):
        require_known(name, table, where, what)
        return table[name]
    module, _, attribute = name.partition(SEPARATOR)
    rule, advice = f"{what} must name a row of a module", "Put its folder on PYTHONPATH, of workers too."
    with refusing((ImportError, AttributeError, ValueError), where, rule, {what: name}, advice):
        row = getattr(importlib.import_module(module), attribute)
    kind = type(next(iter(table.values())))
    rule, got = f"{what} must name a row of the kind {kind.__name__}", {what: name, "type": type(row).__name__}
    require(isinstance(row, kind), where, rule, got, "Make one of the package's class.", TypeError)
    return cast(T, row)


def digests_of_modules(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source of each module from outside whose rows are named, by the name of the module.

    Errors   ValueError for a module without a file of source, which no other process could import
    """
    digests = {}
    for module in sorted({name.partition(SEPARATOR)[0] for name in names if is_from_outside(name)}):
        rule, advice = "a module whose rows are named must be a file of source", "Write its rows into a file."
        with refusing((OSError, TypeError), "model", rule, {"module": module}, advice):
            source = inspect.getsource(importlib.import_module(module))
        digests[module] = hashlib.sha256(source.encode()).hexdigest()[:12]
    return digests


def require_allowed(names: Iterable[str], where: str) -> None:
    """Refuse rows in a file unless their modules are imported or allowed: a file must not decide what code runs.

    Errors   ValueError
    """
    allowed = os.environ.get(ALLOWED, "").split(",")
    for module in [name.partition(SEPARATOR)[0] for name in names if is_from_outside(name)]:
        rule, advice = "a module that a file names must be allowed", f"If you trust it, set {ALLOWED}={module}."
        require(module in sys.modules or module in allowed, where, rule, {"module": module}, advice)

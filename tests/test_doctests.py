"""The examples in docstrings of public functions are run, and every public function has one."""

import doctest
import inspect
from importlib import import_module

import pytest
from documents import failures

import daskgpt

FUNCTIONS = [name for name in daskgpt.__all__ if inspect.isfunction(getattr(daskgpt, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_of_a_public_function(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = inspect.unwrap(getattr(daskgpt, name))
    module = import_module(function.__module__)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, module)
    assert example.examples, f"{name} has no example"
    assert failures(example) == ""

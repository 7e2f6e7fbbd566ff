"""Tests of readers with damaged files of every format: some of the cases that `python benchmarks/fuzz.py` makes."""

import pytest
from fuzz_cases import FORMATS, Example, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name, tmp_path):
    example = Example(name, tmp_path / "files")

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def case(data):
        example.check(*data.draw(damaged(example.whole)))

    case()


def test_every_file_of_an_example_is_needed(tmp_path):
    for number, (name, one) in enumerate(FORMATS.items()):
        example = Example(name, tmp_path / str(number))
        for file in one.damaged:
            assert example.check(file, example.whole[file]) == "read"
            assert example.check(file, b"") == "refused"

"""Tests that the tables of pages match the recorded measurements, and that these are valid records."""

from measurements import DATA, main
from records import read_records


def test_pages_match_the_data():
    assert main([]) == 0, "write them anew with: python benchmarks/measurements.py --write"


def test_every_file_holds_records():
    for path in DATA.glob("*.jsonl"):
        records = read_records(path)
        assert records
        assert all(record.machine["processor"] and record.versions for record in records)

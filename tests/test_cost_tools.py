"""The tools that measure what preparing tokens and the dashboard's page cost: short, on real processes."""

from __future__ import annotations

import dashboard_cost
import prepare_rate
import pytest
from command_lines import write_text

from daskgpt.instruments.records import read_records

MODEL = "--blocks 1 --heads 2 --channels 16 --batch-size 4 --sequence-length 16"


def test_a_corpus_is_gathered_of_different_documents(tmp_path):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for number in range(8):
        (folder / f"{number}.py").write_text(f"x = {number // 2}\n" * 50)  # each content twice
    (folder / "below" / "other.md").write_bytes(b"\xff" * 400)
    (folder / "short.txt").write_text("short")
    assert prepare_rate.gather([folder], 2000, tmp_path / "corpus.txt") == 4
    text = (tmp_path / "corpus.txt").read_text()
    assert sorted(set(text.split("\n"))) == ["", "x = 0", "x = 1", "x = 2", "x = 3"]
    with pytest.raises(ValueError, match="only 1,"):
        prepare_rate.gather([folder], 10_000, tmp_path / "more.txt")
    assert not (tmp_path / "more.txt").exists()


@pytest.mark.slow
def test_preparing_is_timed_and_its_bytes_compared(tmp_path, capsys):
    text, path = write_text(tmp_path), tmp_path / "records.jsonl"
    prepare_rate.main(
        ["--text", str(text), "--encoding", "bytes", "--turns", "1", "--check", "--record", str(path)],
    )
    shown = capsys.readouterr().out
    assert shown.count("the same bytes") == 3
    (found,) = read_records(path)
    assert set(found.figures) == {"prepare", "tiktoken", "ratio", "peak"}


@pytest.mark.slow
def test_the_page_is_opened_and_closed_while_a_run_goes_on(tmp_path, capsys):
    data, path = write_text(tmp_path), tmp_path / "records.jsonl"
    dashboard_cost.main([*f"--pairs 2 --window 4 --record {path} --data {data} {MODEL}".split()])
    (found,) = read_records(path)
    assert found.figures["a step with the page / without"].n == 2
    assert "2 pairs of 4 steps" in capsys.readouterr().out

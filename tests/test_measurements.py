"""What pages say was measured is what the data say; and the data are records."""

from __future__ import annotations

import pytest
from measurements import DATA, PLACE, ROOT, number, pages, rendered, spread
from timeline_picture import PICTURE, kept, picture, timeline

from daskgpt import study
from daskgpt.instruments.records import Figure, read_records
from daskgpt.instruments.timeline.strips import svg_strips

FILES = sorted(DATA.glob("*.jsonl"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_data(page):
    assert page.read_text() == rendered(page.read_text()), "write them anew with: python tests/measurements.py --write"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_holds_records(path):
    found = read_records(path)
    assert found
    assert all(record.machine["processor"] and record.versions for record in found)


def test_all_data_are_shown():
    shown = [
        found["name"].partition(" ")[2] for found in PLACE.finditer((ROOT / "docs" / "measurements.md").read_text())
    ]
    assert {path.stem for path in FILES} <= set(shown)


def test_the_picture_is_that_of_the_recorded_calls():
    assert PICTURE.read_text() == picture(), "draw it anew with: python tests/measurements.py --write"


def test_what_a_picture_needs_of_a_trace_is_kept(tmp_path):
    """Of what a study writes: what is kept of its trace draws the picture that it drew itself."""
    assert study.main(["--quick", "--timelines", "--window", "2", "--out", str(tmp_path)]) == 0
    own = timeline(kept(tmp_path / "none.json"))
    assert len(own.lanes) >= 1
    assert own.steps == [2, 3]
    drawn = [svg_strips(own), (tmp_path / "fork_join.svg").read_text()]
    assert all(text.count('fill="#eef0f3"') for text in drawn)


def test_another_figure_makes_another_page():
    page = "<!-- measured: fork-join -->\n\n| old |\n\n<!-- end -->\nstays"
    new = rendered(page)
    assert "1,285" in new
    assert "| old |" not in new
    assert new.endswith("<!-- end -->\nstays")
    assert rendered(new) == new


def test_the_page_of_clusters_has_its_figures_from_the_data():
    text = (ROOT / "cluster" / "README.md").read_text()
    places = {found["name"]: found[0] for found in PLACE.finditer(text)}
    assert "188 (162 .. 192) ms with two workers in 17 tasks, and 277" in places["task costs"]
    assert "| 32 | 64 | 1.2 GB | 1.5 GB | 31.0 GB |" in places["workers' traffic"]
    assert rendered(text.replace("31.0 GB", "31.1 GB")) == text


def test_an_unknown_place_is_an_error():
    with pytest.raises(KeyError):
        rendered("<!-- measured: nothing -->\n<!-- end -->")


def test_how_figures_are_shown():
    assert [number(value) for value in (1395, 926.4, 42.94, 8.9, 0.83, 0, 6.3e-6)] == [
        *("1,395", "926", "42.9", "8.9", "0.83", "0", "6.3e-06"),
    ]
    assert spread(Figure("ms", 2, 1, 3)) == "2 (1 .. 3)"
    assert spread(Figure("ms", least=79, largest=110)) == "79 .. 110"
    assert spread(Figure("ms", 2000, q1=1500, q3=2500), 1e-3) == "2 (1.5 .. 2.5)"

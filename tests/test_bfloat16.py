"""Tests of `--precision auto`: its choice, and what it says."""

from daskgpt.kernels.bfloat16.isa import outruns_float32, unit
from daskgpt.model.precision import BFLOAT16, FLOAT32, resolve


def test_auto_precision_reports_its_choice():
    assert resolve("float32", 768) == (FLOAT32, "products in float32")
    for channels in (128, 255, 256, 768):
        picked, why = resolve("auto", channels)
        assert picked is (BFLOAT16 if outruns_float32(unit()) and channels >= 256 else FLOAT32)
        assert why.startswith("auto: ")

"""How figures are shown."""

import pytest

from kvrelay.bench.report import show


def test_no_figure_is_cut_off_where_the_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    row = {f"a_long_name_{number}": 12345.6 + number for number in range(20)}
    show("figures", [row])
    shown = capsys.readouterr().out
    assert all(f"{value:.1f}" in shown for value in row.values())

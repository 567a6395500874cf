"""The bench of attention over several processes."""

import math

from sightline.bench.rank_scaling import CASES, measure_ranks
from sightline.cli import main


def test_every_case_is_measured_and_predicted():
    results, hardware = measure_ranks(256, 1, ranks=(1, 2))
    assert [(one.case, one.ranks, one.name) for one in results] == [
        (case.name, ranks, name) for ranks in (1, 2) for case in CASES for name in ("forward", "backward")
    ]
    assert all(0 < one.ratio < math.inf for one in results)
    for one in hardware.values():
        assert all(rate > 0 for rate in (one.flops, one.backward_flops, one.bandwidth, one.latency))


def test_the_command_prints_a_table_for_each_case(monkeypatch, capsys):
    monkeypatch.setattr("sightline.cli.ranks_command.measure_ranks", lambda n, _: measure_ranks(n, 1, ranks=(1,)))
    assert main(["bench", "--ranks", "--quick"]) == 0
    page = capsys.readouterr().out
    assert page.count("predicted") == len(CASES)
    assert "mean nothing" in page

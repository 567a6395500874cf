"""The bench of attention over several processes."""

import math

from benchmarks.__main__ import main
from benchmarks.rank_scaling import CASES, measure_ranks


def test_every_case_is_measured_predicted_and_printed(monkeypatch, capsys):
    found = []

    def measure(n, repeats):
        found.append(measure_ranks(256, repeats, ranks=(1, 2)))
        return found[0]

    monkeypatch.setattr("benchmarks.rank_scaling.measure_ranks", measure)
    assert main(["--ranks", "--quick"]) == 0
    page = capsys.readouterr().out
    assert page.count("predicted") == len(CASES)
    assert "mean nothing" in page
    ((results, hardware),) = found
    assert [(one.case, one.ranks, one.name) for one in results] == [
        (case.name, ranks, name) for ranks in (1, 2) for case in CASES for name in ("forward", "backward")
    ]
    assert all(0 < one.ratio < math.inf for one in results)
    for one in hardware.values():
        assert all(rate > 0 for rate in (one.flops, one.backward_flops, one.bandwidth, one.latency))

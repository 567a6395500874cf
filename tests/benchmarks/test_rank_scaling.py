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
    assert all(page.count(case.name) == 4 for case in CASES)
    assert "mean nothing" in page
    ((results, links),) = found
    assert [(one.case, one.ranks, one.name) for one in results] == [
        (case.name, ranks, name) for case in CASES for ranks in (1, 2) for name in ("forward", "backward")
    ]
    assert all(0 < one.measured / one.predicted < math.inf for one in results)
    assert list(links) == [2]
    assert min(links[2]) > 0

"""What `sightline bench` does: named problems, peers and our own kernels in turn, the machine's own peaks beside.

    problems → peers prepare → check (nobody is timed whose answer nobody looked at) → measure → report, pictures

`problems` is the one table; `measure.run` takes a line of it and gives a `report.Finding`. docs/bench.md says how to
read what comes out.
"""

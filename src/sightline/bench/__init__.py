"""What `sightline bench` does: named problems, peers and our own kernels in turn, the machine's own peaks beside.

    problems → peers prepare → check (nobody is timed whose answer nobody looked at) → measure → report, pictures

`device` is where: the processor, or a GPU (`cuda`), each with its problems, peers, clock and peaks. A table of problems
is the one list of them; `measure.run` takes a line of it and gives a `report.Finding`. docs/bench.md says how to read
what comes out.
"""

"""The benchmarks of `sightline bench`: Sightline and peer libraries on named problems, with the machine's peaks.

    benchmarks → contenders prepare → check each output against the reference → measure → report, figures

Every contender's output is checked against the reference before the contender is timed. A `device.Device`, a CPU or a
GPU (`cuda`), has its own benchmarks, peers, clock and peaks. `benchmarks` and `cuda_benchmarks` list the problems;
`measure.run` measures one problem and returns a `report.Finding`. docs/bench.md explains how to read the results.
"""

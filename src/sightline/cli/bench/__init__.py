"""The benchmarks of `sightline bench` time Sightline and peer libraries, the contenders, on named problems.

    benchmarks → contenders prepare → check each output against the reference → measure → report, figures

Every contender's output is checked against the reference before the contender is timed. A `device.Device` is a CPU or a
GPU (`cuda`); each device has its own benchmarks, peers, clock and peaks, the highest rates measured on it. `benchmarks`
and `cuda_benchmarks` list the problems. Problems whose contenders are not implementations of a workload are groups of
`cases`: short calls, overheads and whole models. `measure.run` measures one problem and returns a `report.Finding`.
docs/bench.md explains how to read the results.
"""

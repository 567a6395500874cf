"""The benchmarks of `python -m benchmarks` time contenders on named problems: Sightline and other libraries (peers).

    benchmarks → contenders prepare → check each output against the reference → measure → report, figures

A benchmark is a case or a group of `cases`: a `workload`, a short call, a tangent, a whole model, or a case that times
itself (`host_cases`). `benchmarks` and `cuda_benchmarks` list them. `measure.run` measures one benchmark and returns a
`report.Finding`; every contender's output is checked against the reference before the contender is timed. A
`device.Device` is a CPU or a GPU (`cuda`). Each device has its own benchmarks, peers, clock and peaks. A peak is the
highest rate measured on the device. docs/bench.md explains how to read the results.
"""

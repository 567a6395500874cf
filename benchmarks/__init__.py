"""The benchmarks of `python -m benchmarks` time contenders on named problems: Sightline beside other libraries.

`core` has the three nouns: a Problem, the Contenders that compute it, and the Measurement of each contender. Each
topic has a file with its problems and contenders: `attention`, `short_calls`, `models`, `first_calls` and, for a GPU,
`cuda_problems`. `cpu_problems` lists the problems of a CPU. `measure` checks the result of each contender against the
float64 definition (`check`) and then times the contenders in turn. `report` prints and stores the measurements.
"""

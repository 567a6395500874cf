"""A fake of torch.cuda on the CPU for tests of the GPU benchmarks: events, a runtime, and the benchmarks to run."""

import time
from contextlib import contextmanager

from benchmarks import cuda_problems
from benchmarks.workloads import Workload

WORKLOADS = {workload.name: workload for workload in cuda_problems.BENCHMARKS if isinstance(workload, Workload)}


class Event:
    """A CUDA event that uses the host's clock."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Runtime:
    """The functions of torch.cuda that the benchmarks call. CUDA graphs raise an error."""

    Event = Event
    held, CUDAGraph = 1 << 20, object

    def get_device_name(self):
        return "a processor in a GPU's place"

    def synchronize(self):
        pass

    def reset_peak_memory_stats(self):
        pass

    def memory_allocated(self):
        return 1 << 16

    def max_memory_allocated(self):
        return (1 << 16) + self.held

    def graph(self, _):
        raise RuntimeError("no graph can be captured")


class Capturing(Runtime):
    """A runtime whose CUDA graphs count their replays."""

    class CUDAGraph:
        replays = 0

        def replay(self):
            self.replays += 1

    @contextmanager
    def graph(self, graph):
        self.cuda_graph = graph
        yield

"""A fake of torch.cuda on the CPU for tests of the GPU benchmarks: events and a runtime."""

import time


class Event:
    """A CUDA event that uses the host's clock."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Runtime:
    """The functions of torch.cuda that the benchmarks call."""

    Event = Event

    def get_device_name(self):
        return "a processor in a GPU's place"

    def synchronize(self):
        pass

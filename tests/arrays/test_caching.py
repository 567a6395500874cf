"""The cached property: computed once for each object, and without a lock."""

import threading
from dataclasses import dataclass

from sightline.arrays.caching import cached_property


@dataclass(frozen=True)
class Circle:
    radius: int

    @cached_property
    def calls(self):
        """How often the property was computed."""
        return [self.radius]


def test_the_property_is_computed_once_for_each_object():
    small, large = Circle(1), Circle(2)
    assert small.calls is small.calls
    assert (small.calls, large.calls) == ([1], [2])
    assert small == Circle(1)
    assert Circle.calls.__doc__ == "How often the property was computed."


class Slow:
    """An object whose property another thread computes for as long as the test wants."""

    def __init__(self):
        self.begun, self.end = threading.Event(), threading.Event()

    @cached_property
    def value(self):
        self.begun.set()
        assert self.end.wait(20)
        return object()


def test_no_thread_waits_for_the_property_of_another_object():
    slow, other = Slow(), Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(20)
    other.end.set()
    reader = threading.Thread(target=lambda: other.value, daemon=True)
    reader.start()
    reader.join(10)
    was_waiting = reader.is_alive()
    slow.end.set()
    thread.join()
    assert not was_waiting


def test_threads_that_compute_at_once_receive_one_value():
    slow, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(slow.value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    slow.end.set()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert set(map(id, found)) == {id(slow.value)}

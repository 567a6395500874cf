"""What the tests of the call cache share: uncached calls to compare with, keys, and a record of the calls that hit."""

import sightline
from sightline import i, j, s, where
from sightline.call import call_cache
from sightline.call.call_cache import LOOKUP
from sightline.call.problem import Options, parse, validate
from sightline.call.request import describe
from sightline.cpu.launch.forward_entry import ForwardEntry
from sightline.cpu.launch.launch_record import LaunchRecord
from sightline.kv_cache import unpack_cache

FORMULAS = {
    "none": dict,
    "causal, written anew": lambda: {"mask": i >= j},
    "named": lambda: {"mask": sightline.causal("lower right")},
    "window": lambda: {"mask": (i >= j) & (i - j < 7)},
    "score": lambda: {"score": where(j < 3, s * 0.5, s - 1)},
    "both": lambda: {"mask": sightline.window(5, 2), "score": sightline.softcap(2.0)},
    "scale": lambda: {"scale": 0.3},
    "one thread": lambda: {"threads": 1, "kernel": "cpu"},
    "two threads": lambda: {"threads": 2},
}


def uncached(arrays, **options):
    """Return the result of a call with an empty call cache."""
    call_cache.clear()
    return sightline.attention(*arrays, **options)


def run_in_python(monkeypatch):
    """Let no call become direct: each repetition computes its words in Python, and has a launch record of its own."""
    monkeypatch.setattr(LaunchRecord, "can_be_kept", False)


def record_hits(monkeypatch):
    """Return a list that grows by one with every call that the cache answers. No call becomes direct."""
    run_in_python(monkeypatch)
    found, run = [], ForwardEntry.run

    def spy(*given):
        answer = run(*given)
        found.extend([1] * (answer is not None))
        return answer

    monkeypatch.setattr(ForwardEntry, "run", spy)
    return found


def cache_problem(query, cache, **options):
    """Return the problem of attention on a cache."""
    return validate(parse(query, *unpack_cache(query, cache, None, Options(**options))))


def key_of(query, key, value, **options):
    """The key of a call of `sightline.attention` with these arguments; None if the call cannot be cached."""
    request = describe(query, Options(**options))
    found = None if request is None else LOOKUP.read_arrays(query, key, value, *request.arrays)
    return None if found is None else (found[0], request.structure)

"""A program that forks while three threads call attention. Every child must finish the same calls.

    python forked_calls.py SEED COUNT [PACKAGE]

The calls read tables and documents, compute statistics and gradients, and sometimes compile a kernel. PACKAGE, for
example torch, is imported first. A child that hangs prints the stack of each of its threads.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from importlib import import_module

import numpy as np

from sightline.call.kernel import GivenGradients

MAX_CHILD_SECONDS = 10
WORKERS = 3


def main(seed, count, *packages):
    for package in packages:
        import_module(package)
    import sightline
    from sightline import b, h, i, j, s, table
    from sightline.call.problem import make_problem
    from sightline.cpu import Cpu

    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 2, 70, 16)).astype(np.float32)
    ids, slopes = np.repeat([0, 1, 2], [30, 25, 15]), np.array([0.5, 0.25], np.float32)
    received, entropy = sightline.received(), sightline.entropy()

    def attend(number=0):
        """Return the results of all calls. Each number has a kernel of its own."""
        position = table(np.arange(70))
        masks = [sightline.documents(ids), position[i] >= position[j], i - j < 40 + number]
        found = []
        for mask in masks:
            score = s + table(slopes)[h] * (i - j) + 0 * b
            output, seen = sightline.attention(
                x, x, x, mask=mask, score=score, see=[received, entropy], kernel="cpu", threads=2
            )
            found += [output, *seen]
        found.append(sightline.attention(x, x, x, mask=i >= j, kernel="cpu", threads=2))
        problem = make_problem(x, x, x, mask=masks[0], score=s - table(slopes)[h] * abs(i - j), threads=2)
        result = Cpu().run(problem)
        gradients = Cpu().backward(problem, GivenGradients(result.output, None, (result.output, result.lse), [0, 1]))
        return [*found, gradients.query, gradients.key, gradients.value]

    expected = attend()

    def is_right():
        return all(np.array_equal(one, other) for one, other in zip(attend(), expected, strict=True))

    stopped, wrong = threading.Event(), []
    sys.setswitchinterval(1e-6)  # so that forks meet the threads in every state

    def work(number):
        while not stopped.is_set():
            number += WORKERS
            attend(number if number % 20 == 0 else 0)  # a new number compiles kernels
            if not is_right():
                wrong.append(number)
            for _ in range(30):
                make_problem(x, x, x, mask=sightline.documents(ids), score=s - table(slopes)[h] * (i - j))

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    failed = 0
    for number in range(count):
        time.sleep(rng.uniform(0, 0.005))
        child = os.fork()
        if child == 0:
            signal.alarm(MAX_CHILD_SECONDS)
            os._exit(not is_right())
        status = os.waitpid(child, 0)[1]
        if status != 0:
            print(f"child {number} ended with status {status}", file=sys.stderr, flush=True)
            failed += 1
    stopped.set()
    for worker in workers:
        worker.join(MAX_CHILD_SECONDS)
    assert (wrong, failed) == ([], 0)
    assert not any(worker.is_alive() for worker in workers)
    print("children:", count)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])

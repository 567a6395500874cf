"""A kernel whose cost and refusals a test sets."""

from sightline.call.kernel import Kernel, Refusal


class Choosy(Kernel):
    """A kernel with a given cost that refuses for the given reasons."""

    description = "for this test"

    def __init__(self, name, cost, *reasons):
        self.name, self._cost, self._reasons = name, cost, reasons

    def refuses(self, problem):
        yield from (Refusal(reason, f"no {reason}") for reason in self._reasons)

    def cost(self, problem):
        return self._cost

    def run(self, problem):
        raise AssertionError("not to be run")

"""The language of masks and scores: `expression` is the graph, `library` has ready masks and scores."""

from .expression import PASSES
from .numpy_functions import call, power
from .printing import mathematics
from .render_array import dense_values
from .tables import learned_number
from .validate import check_reads

PASSES.call = call
PASSES.check_reads = check_reads
PASSES.dense_values = dense_values
PASSES.learned_number = learned_number
PASSES.mathematics = mathematics
PASSES.power = power

"""The language of masks and scores: `expression` is the graph, `library` has ready masks and scores."""

from .composed_functions import COMPOSED
from .evaluate_array import evaluate_dense
from .expression import apply
from .expression_methods import PASSES
from .formula_checks import check_formula
from .numpy_functions import tensor_attribute, translate_call
from .printing import format_formula
from .table_rows import Row
from .tables import learned_number
from .tile_ranges import count_pairs

PASSES.apply = apply
PASSES.check_formula = check_formula
PASSES.composed = COMPOSED
PASSES.count_pairs = count_pairs
PASSES.evaluate_dense = evaluate_dense
PASSES.format_formula = format_formula
PASSES.learned_number = learned_number
PASSES.make_row = Row
PASSES.tensor_attribute = tensor_attribute
PASSES.translate_call = translate_call

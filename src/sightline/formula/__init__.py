"""The language of masks and scores: `expression` is the graph, `library` has ready masks and scores."""

from . import composed_functions
from .evaluate_array import evaluate_dense
from .expression import apply
from .formula_checks import check_formulas
from .numpy_functions import tensor_attribute, translate_call
from .passes import PASSES
from .printing import format_formula
from .tables import learned_number
from .tile_ranges import count_pairs

PASSES.apply = apply
PASSES.check_formulas = check_formulas
PASSES.count_pairs = count_pairs
PASSES.evaluate_dense = evaluate_dense
PASSES.learned_number = learned_number
PASSES.format_formula = format_formula
PASSES.power = composed_functions.power
PASSES.translate_call = translate_call
PASSES.tensor_attribute = tensor_attribute
PASSES.bitwise = {
    "and": composed_functions.bitwise_and,
    "or": composed_functions.bitwise_or,
    "xor": composed_functions.bitwise_xor,
    "lshift": composed_functions.shift_left,
    "rshift": composed_functions.shift_right,
}

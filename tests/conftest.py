"""Settings of all tests: equal random draws in every run, soak and wide tests only with `-m soak` and `-m wide`."""

import gc
import os
import zlib
from collections import OrderedDict
from importlib.util import find_spec

import numpy.ma  # its first import fails in a test that has changed NumPy's functions
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from default_device import default_device  # noqa: F401 - a fixture of every test

pytest.register_assert_rewrite(
    "elementary_functions",
    "fake_cuda",
    "gradient_checks",
    "sample_problems",
    "statistic_definitions",
    "weights_pass_checks",
)  # a failed assertion in these modules shows its values, as in a test

collect_ignore = ["helpers"]
if find_spec("transformers") is None:
    collect_ignore += ["transformers"]
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore += ["gpu/interpreted"]

UNFREEZE = gc.unfreeze

settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.register_profile("soak", settings.get_profile("suite"), derandomize=False, max_examples=20_000)
settings.load_profile("suite")
torch.set_num_threads(1)  # tests run in parallel processes


def pytest_configure(config):
    if "soak" in config.getoption("markexpr"):
        settings.load_profile("soak")


# What `make test-wide` runs: products of dtypes, layouts and frameworks, and long programs. A row names a file, a
# function, or a test with its parameters; the most exact row counts. For the number k of a row, `make test` runs about
# one of k of these tests. For 0 it runs none. The names of the tests decide which, so every run has the same tests.
WIDE = {
    "api/test_from_disk.py::test_a_window_with_sinks_and_documents": 3,
    "api/test_from_disk.py::test_anonymous_memory_stays_within_the_limit": 0,
    "api/test_tangents.py::test_tangents": 3,
    "api/test_vjp.py::test_first_and_repeated_calls_have_the_gradients_of_torch": 16,
    "arrays/test_arrays.py::test_attention_with_a_mask_or_bias_that_repeats": 2,
    "arrays/test_unreadable.py::test_right_or_refused_by_name": 10,
    "benchmarks/test_bench.py::test_a_quick_run": 0,
    "benchmarks/test_bench.py::test_installed_peers_are_right": 3,
    "benchmarks/test_bench.py::test_small_versions_are_right": 8,
    "benchmarks/test_bench.py::test_wrong_statistics_are_found": 4,
    "benchmarks/test_bench_cuda.py": 4,
    "benchmarks/test_bench_models.py::test_every_contender_is_right": 4,
    "benchmarks/test_short_calls.py::test_both_contenders_are_right": 3,
    "call/test_cached_statistics.py::test_gradients_of_statistics_in_any_order": 2,
    "call/test_repeated_calls.py::test_drawn_calls_equal_the_definition": 11,
    "cpu/test_backward_parts.py::test_gradients_are_those_of_the_whole": 3,
    "cpu/test_backward_parts.py::test_the_memory_of_the_backward_pass_is_constant": 0,
    "cpu/test_decode.py::test_drawn_problems": 4,
    "cpu/test_decode.py::test_heads_that_are_neighbours_in_memory_share_an_item": 4,
    "cpu/test_decode.py::test_keys_that_no_row_sees_are_not_read": 3,
    "cpu/test_decode.py::test_nan_that_one_row_sees_is_the_forward_kernels": 3,
    "cpu/test_direct_call.py::test_references_are_balanced": 3,
    "cpu/test_processors.py::test_drawn_problems": 4,
    "cpu/test_processors.py::test_kernels_keep_to_their_machine": 4,
    "cpu/test_processors.py::test_kernels_of_the_weights_pass_keep_to_their_machine": 4,
    "cpu/test_processors.py::test_kernels_use_what_their_machine_has": 4,
    "cpu/test_processors.py::test_named_problems": 4,
    "cpu/test_processors.py::test_sums_of_products_stay_in_registers": 4,
    "cpu/test_processors.py::test_the_weights_pass": 4,
    "cpu/test_product_rates.py::test_problems_of_a_processor_with_slow_dot_products": 4,
    "cpu/test_shared_tiles.py::test_gradients": 10,
    "cpu/test_shared_tiles.py::test_outputs": 9,
    "cpu/test_targets.py::test_kernels_are_compiled_for_every_system": 6,
    "cpu/test_targets.py::test_kernels_of_another_system_conform": 4,
    "cpu/test_threads.py::test_a_fork_calls_and_so_does_its_parent": 2,
    "cpu/test_threads.py::test_calls_as_the_interpreter_ends": 3,
    "cpu/test_threads.py::test_calls_work_after_an_interrupted_call": 3,
    "cpu/test_weights_pass.py::test_drawn_problems": 3,
    "cpu/test_weights_pass.py::test_drawn_problems_with_several_statistics": 3,
    "cpu/test_weights_pass.py::test_named_problems": 3,
    "cpu/test_weights_pass.py::test_wide_heads": 0,
    "formula/test_batch_axes.py::test_gradients_of_an_array_with_leading_axes": 5,
    "formula/test_block_lists.py::test_on_a_cache_rows_choose_the_lists": 6,
    "gpu/test_ahead_of_time.py::test_resources_of_kernels": 2,
    "gpu/test_ahead_of_time.py::test_stages_are_reduced_to_fit_shared_memory_and_only_the_last_kernel_is_returned": 0,
    "gpu/test_interpreted.py::test_interpreted": 0,
    "gpu/test_interpreted.py::test_interpreted[test_gpu_faults]": 1,
    "jax/test_array_operations.py": 0,
    "jax/test_distributed.py": 0,
    "jax/test_dot_product_attention.py::test_results_conform_to_the_definition": 4,
    "jax/test_equinox.py::test_a_model_trains_as_with_equinox": 0,
    "jax/test_equinox.py::test_results_and_gradients_are_those_of_equinox": 3,
    "jax/test_flax.py::test_a_layer_of_linen": 3,
    "jax/test_flax.py::test_a_layer_of_nnx": 3,
    "jax/test_flax.py::test_a_model_of_linen_trains_as_with_flax": 0,
    "jax/test_jax.py": 4,
    "jax/test_programs.py": 0,
    "keras/test_keras_backends.py": 0,
    "keras/test_keras_multi_head_attention.py::test_output_and_weights_equal_those_of_keras": 3,
    "kv_cache/test_fork.py::test_calls_on_shared_prefixes": 5,
    "kv_cache/test_fork.py::test_quantized_prefixes": 4,
    "kv_cache/test_fork.py::test_ten_thousand_operations_leave_nothing_behind": 0,
    "kv_cache/test_kv_cache.py::test_a_compiled_loop_gives_the_same_outputs": 0,
    "kv_cache/test_kv_cache.py::test_a_loop_gives_the_rows_of_causal_attention": 5,
    "kv_cache/test_quantized_attention.py::test_attention_is_exact_on_the_stored_numbers": 3,
    "kv_cache/test_quantized_attention.py::test_every_number_of_threads_gives_the_same_bits": 3,
    "kv_cache/test_quantized_attention.py::test_gradients_of_the_query": 2,
    "kv_cache/test_quantized_attention.py::test_narrow_queries": 5,
    "kv_cache/test_quantized_attention.py::test_statistics_are_those_of_the_stored_numbers": 4,
    "kv_cache/test_query_positions.py::test_a_formula_means_what_it_means_for_the_whole_sequence": 10,
    "partition/test_lse_merge.py::test_gradients_through_parts_equal_those_of_the_whole": 5,
    "reference/test_gathered_keys.py::test_conforms": 5,
    "reference/test_gradients.py": 2,
    "statistics/test_reductions.py::test_drawn_reductions": 8,
    "statistics/test_statistics.py::test_compiled_without_graph_breaks": 3,
    "statistics/test_statistics.py::test_drawn_problems": 4,
    "statistics/test_statistics.py::test_gradients_equal_finite_differences": 4,
    "statistics/test_statistics.py::test_gradients_within_budget": 3,
    "statistics/test_statistics.py::test_gradients_within_budget_by_the_generated_kernel": 3,
    "test_conformance.py": 4,
    "test_examples.py": 0,
    "test_hostile.py::test_kernels_still_conform": 4,
    "test_imports.py::test_submodules_load_when_they_are_first_accessed": 0,
    "test_memory.py::test_a_sum_over_heads_holds_one_matrix": 3,
    "test_memory.py::test_peak_memory": 5,
    "test_packed.py::test_each_document_equals_the_document_alone": 3,
    "test_real.py::test_kernels_agree_with_the_model": 4,
    "test_real.py::test_kernels_conform_on_real_activations": 4,
    "test_soak.py::test_no_access_outside_an_array": 0,
    "torch/distributed/test_distributed_attention.py": 3,
    "torch/distributed/test_distributed_errors.py::test_other_ranks_raise_an_error": 0,
    "torch/distributed/test_distributed_training.py": 0,
    "torch/test_backward_inputs.py::test_gradients_of_statistics": 3,
    "torch/test_causal_bias.py": 12,
    "torch/test_export.py::test_a_compiled_module_with_a_parameter_as_a_table": 0,
    "torch/test_flex.py::test_published_functions": 4,
    "torch/test_functional.py::test_drawn_calls_agree_with_torch": 0,
    "torch/test_layers.py": 6,
    "torch/test_nested.py::test_each_sequence_is_computed_alone": 4,
    "torch/test_operator.py::test_calls_compile_to_one_graph": 4,
    "torch/test_operator.py::test_changing_numbers_in_formulas_compile": 0,
    "torch/test_operator.py::test_gradients_equal_finite_differences": 0,
    "torch/test_operator.py::test_gradients_of_gradients_equal_finite_differences": 3,
    "torch/test_operator.py::test_leading_axes_of_a_bias_broadcast_when_compiled": 3,
    "torch/test_operator.py::test_opcheck": 4,
    "torch/test_operator.py::test_output_and_statistics_equal_their_definitions": 4,
    "torch/test_registry.py::test_compiled_calls": 4,
    "torch/test_transforms.py::test_derivatives_of_mapped_calls": 4,
    "torch/test_transforms.py::test_second_derivatives": 4,
    "torch/test_transforms.py::test_vmap_of_statistics": 2,
    "transformers/test_attention_interface.py::test_a_compiled_model_generates_with_a_static_cache": 3,
    "transformers/test_attention_interface.py::test_output_and_weights_are_those_of_the_model": 4,
    "transformers/test_decoding_cache.py::test_a_watch_records_the_statistics_of_dynamic_cache": 3,
    "transformers/test_decoding_cache.py::test_another_dtype_reaches_attention_as_it_is_stored": 7,
    "transformers/test_decoding_cache.py::test_drafts_are_rejected_as_in_dynamic_cache": 5,
    "transformers/test_decoding_cache.py::test_greedy_generation_is_that_of_dynamic_cache": 3,
    "transformers/test_decoding_cache.py::test_quantised_keys_and_values": 7,
    "transformers/test_mask_interface.py": 4,
    "transformers/test_model_masking.py::test_a_formula_restricts_the_masks_of_the_model": 8,
    "transformers/test_word_times.py::test_a_trained_model_equals_the_eager_path_and_the_pipeline": 0,
    "transformers/test_word_times.py::test_long_audio_equals_the_eager_path": 0,
}


def is_wide(item):
    """True if `make test` leaves the test to `make test-wide`."""
    name = item.nodeid.removeprefix("tests/")
    names = name, name.partition("[")[0], name.partition("::")[0]
    kept = next((WIDE[each] for each in names if each in WIDE), 1)
    return kept == 0 or zlib.crc32(name.encode()) % kept > 0


def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `soak`, and wide ones, unless -m names that marker or the command names the test."""
    chosen, named = config.getoption("markexpr"), any("::" in argument for argument in config.args)
    for item in items:
        if not item.get_closest_marker("soak") and is_wide(item):
            item.add_marker("wide")
    hidden = [marker for marker in ("soak", "wide") if marker not in chosen and not (marker == "wide" and named)]
    deselected = [item for item in items if any(map(item.get_closest_marker, hidden))]
    if chosen == "wide":
        deselected += [item for item in items if not item.get_closest_marker("wide")]
    left_out = set(map(id, deselected))
    items[:] = [item for item in items if id(item) not in left_out]
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish():
    """Exclude the 600,000 objects that imports created from garbage collection, which saves 0.4 s per collection.

    A test that runs the bench must not include them again: `interleave` freezes and unfreezes all objects.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_unconfigure():
    gc.unfreeze = UNFREEZE
    gc.unfreeze()  # libraries check for leftover objects at exit


@pytest.fixture
def fresh_calls(monkeypatch):
    """Start with an empty call cache, and leave no call in it: for tests that change which kernels there are."""
    from sightline.call import call_cache

    monkeypatch.setattr(call_cache, "calls", OrderedDict())
    monkeypatch.setattr(call_cache, "families", OrderedDict())


@pytest.fixture
def fresh_kernels(monkeypatch, fresh_calls):
    """Compile kernels again and cache none of them: for tests that change the code generator."""
    from sightline.cpu.runtime import compile

    monkeypatch.setattr(compile, "_cache", compile.KernelCache())
    monkeypatch.setenv("SIGHTLINE_CACHE", "off")


@pytest.fixture
def rng():
    """A random generator with a fixed seed."""
    return numpy.random.default_rng(20170612)


@pytest.fixture
def by_definition(monkeypatch):
    """Register attention by its definition in transformers, under the name "definition"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from tiny_models import definition

    def mask(*arguments, **options):
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "definition", definition)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "definition", mask)

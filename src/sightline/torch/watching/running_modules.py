"""Which modules of a watched model run: a stack of their paths for each thread, kept by hooks on the modules.

While a thread runs a watched module, the finder is on in the thread: a mode of torch that sees attention calls. Other
code may run later or in another thread: threads that a module starts, tasks that it submits to a pool, and checkpointed
functions in a backward pass. Such code gets the path of the module that started it. During a watch, compiled code runs
uncompiled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ...errors import ParameterError
from ..interception import in_eager_code
from ..layer_calls import wrapping


class Running(NamedTuple):
    """A module that runs: its path in the model, its class, and the number of the model's run."""

    path: str
    kind: type
    run: int
    has_switched_on: bool = False  # True if the module has switched the finder on, and must switch it off


class _Thread(threading.local):
    """What runs in a thread: the stacks of running modules by model, and whether the finder is on."""

    def __init__(self) -> None:
        self.stacks: dict[RunningModules, list[Running]] = {}
        self.uses = 0  # contexts that need the finder
        self.hands_over = True  # False while this library or a pool starts threads of its own


THREAD = _Thread()


def nested_error() -> ParameterError:
    """Return the error about nested tensors."""
    return ParameterError(
        "attention of nested tensors in a watch", "tensors with padding", "watch the model with a padded batch"
    )


def module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of every module, without what torch.compile adds. The model's path is the name of its class."""
    return {
        module: name.removeprefix("_orig_mod").removeprefix(".").replace("._orig_mod.", ".") or type(module).__name__
        for name, module in model.named_modules()
    }


class RunningModules:
    """The modules of one watched model that run in each thread, the innermost last. A finder is on while they run."""

    finder: TorchFunctionMode

    def __init__(self, model: nn.Module) -> None:
        self.runs, self.has_run, self.has_ended = count(), False, False
        self.paths = module_paths(model)

    @contextmanager
    def follow(self, finder: TorchFunctionMode) -> Iterator[None]:
        """Keep the stacks while the context lasts. In the thread of the context the finder is on all the time."""
        self.finder = finder
        with ExitStack() as exit_stack:
            exit_stack.enter_context(_process_wide_changes())
            for module, path in self.paths.items():
                hooks = _Hooks(self, path)
                exit_stack.callback(module.register_forward_pre_hook(hooks.enter, prepend=True).remove)
                exit_stack.callback(module.register_forward_hook(hooks.leave, always_call=True).remove)
            exit_stack.enter_context(_using(finder))
            try:
                yield
            finally:
                self.has_ended = True
                self.end()  # an interrupt skips the hooks

    def current(self) -> Running | None:
        """Return the innermost module that runs in this thread; None if none does.

        A method of a module may be called while no `forward` runs. Then the module is the `self` of a calling function.
        """
        stack = THREAD.stacks.get(self)
        if stack:
            return stack[-1]
        frame = sys._getframe(1)
        while frame is not None:
            if "self" in frame.f_code.co_varnames or "self" in frame.f_code.co_freevars:
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and module in self.paths:
                    return Running(self.paths[module], type(module), next(self.runs))
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def end(self, place: int = 0) -> None:
        """Remove the modules of this place and above from the stack of this thread."""
        stack = THREAD.stacks.get(self, [])
        while len(stack) > place:
            if stack.pop().has_switched_on:
                torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
        if not stack:
            THREAD.stacks.pop(self, None)


class _Hooks:
    """The hooks of a module. Its replicas on other devices share the hooks. The hooks of a copy do nothing."""

    def __init__(self, modules: RunningModules | None, path: str) -> None:
        self.modules, self.path = modules, path

    def __reduce__(self) -> tuple[Any, ...]:  # copy.deepcopy and pickle call it, and a copy outlives the watch
        return _Hooks, (None, "")

    @in_eager_code
    def enter(self, module: nn.Module, inputs: Any) -> None:
        modules = self.modules
        if modules is None:
            return
        if module not in modules.paths and not getattr(module, "_is_replica", False):  # a copy by copy.copy
            return
        if isinstance(module, nn.MultiheadAttention) and any(getattr(x, "is_nested", False) for x in inputs):
            raise nested_error()  # torch would name its fast path, which a watch switches off
        modules.has_run = True
        stack = THREAD.stacks.setdefault(modules, [])
        is_off = not _is_on(modules.finder)  # also in a function of torch that runs modules, such as a backward pass
        if is_off:
            modules.finder.__enter__()  # type: ignore[no-untyped-call]
        stack.append(Running(self.path, type(module), stack[-1].run if stack else next(modules.runs), is_off))

    def leave(self, *_: Any) -> None:
        if self.modules is None:
            return
        stack = THREAD.stacks.get(self.modules, ())
        place = len(stack) - 1
        while place >= 0 and stack[place].path != self.path:  # a module above it, whose hooks an error has skipped
            place -= 1
        if place >= 0:
            self.modules.end(place)


def _is_on(finder: TorchFunctionMode) -> bool:
    for place in range(torch._C._len_torch_function_stack()):  # a loop, because every module of a model asks
        if torch._C._get_function_stack_at(place) is finder:
            return True
    return False


@contextmanager
def _using(finder: TorchFunctionMode) -> Iterator[None]:
    """Switch the finder on in this thread. The last of several contexts to exit switches the finder off."""
    THREAD.uses += 1
    if THREAD.uses == 1:
        finder.__enter__()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        THREAD.uses -= 1
        if THREAD.uses == 0:
            torch.overrides._pop_mode()  # type: ignore[no-untyped-call]


# -- other threads and compiled code -----------------------------------------------------------------------------------
_lock = threading.Lock()
_changes = ExitStack()
_count = 0  # contexts that need the changes


@contextmanager
def _process_wide_changes() -> Iterator[None]:
    """In this context, a new thread inherits the running modules of its starter, and compiled code runs uncompiled."""
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            for owner, name, wrapper in (
                (threading.Thread, "start", _start),
                (ThreadPoolExecutor, "submit", _submit),
                (checkpoint._CheckpointFrame, "__init__", _init_frame),
                (nn.TransformerEncoder, "forward", _encode),
            ):
                _changes.enter_context(wrapping(owner, name, wrapper))
            if "torch._dynamo" in sys.modules:
                _changes.enter_context(torch.compiler.set_stance("force_eager"))
            else:  # nothing is compiled yet, and torch's compiler takes a second to load
                _changes.enter_context(wrapping(torch, "compile", _compile))
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                _changes.close()


def _hand_over(function: Callable[..., Any], is_new_run: bool = False) -> Callable[..., Any]:
    """Return a wrapper that runs the function, in another thread or later, as code of the modules that run here.

    Return the function itself if no module runs. `is_new_run` is True if each call is a further run of these modules.
    """
    tops = {modules: stack[-1]._replace(has_switched_on=False) for modules, stack in THREAD.stacks.items()}
    if not tops:
        return function

    @wraps(function)
    def with_modules(*inputs: Any, **options: Any) -> Any:
        own = THREAD.stacks
        THREAD.stacks = {
            modules: [top._replace(run=next(modules.runs)) if is_new_run else top]
            for modules, top in tops.items()
            if not modules.has_ended
        }
        finder = next(iter(tops)).finder
        try:
            with _using(finder), nullcontext() if _is_on(finder) else finder:
                return function(*inputs, **options)
        finally:
            THREAD.stacks = own

    return with_modules


@contextmanager
def without_hand_over() -> Iterator[None]:
    """In this context, new threads inherit no modules. They belong to a pool, and outlive the modules that run."""
    before, THREAD.hands_over = THREAD.hands_over, False
    try:
        yield
    finally:
        THREAD.hands_over = before


# -- what runs in place of functions of other packages, which are the first parameters --------------------------------


def _start(start: Callable[..., None], thread: threading.Thread) -> None:
    if THREAD.hands_over and THREAD.stacks:
        thread.run = _hand_over(thread.run)  # type: ignore[method-assign]
    start(thread)


def _submit(submit: Callable[..., Any], pool: Any, task: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
    with without_hand_over():
        return submit(pool, _hand_over(task), *inputs, **options)


def _compile(compile_: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    with _lock:
        if _count:
            _changes.enter_context(torch.compiler.set_stance("force_eager"))
    return compile_(*inputs, **options)


def _init_frame(
    start: Callable[..., None], frame: Any, function: Callable[..., Any], _: bool, on_error: Any, *others: Any
) -> None:
    """Make torch's record of a checkpointed function.

    torch raises an error if the second run saves other tensors than the first run, as after the end of the watch.
    """
    watched = tuple(THREAD.stacks)

    def explain(error: Exception) -> None:
        if any(modules.has_ended for modules in watched):
            given = "the backward pass of a checkpointed function, after the watch of its forward pass has ended"
            cure = "call backward() in the `with` block, or watch a forward pass under torch.no_grad()"
            raise ParameterError(given, "backward passes in the `with` block of the watch", cure) from error
        raise error

    on_error = explain if watched and on_error is None else on_error
    # an early stop inside of the attention would leave the second run unrecorded
    start(frame, _hand_over(function, is_new_run=True), False, on_error, *others)


class _FirstAlone(list[nn.Module]):
    """Layers that can be indexed. A loop over them runs none."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())


def _encode(
    encode: Callable[..., torch.Tensor],
    encoder: Any,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> torch.Tensor:
    """Run torch's encoder. A watch switches off its fast path, which writes 0 at padding."""
    inputs = src, mask, src_key_padding_mask, is_causal
    if not THREAD.stacks or src_key_padding_mask is None:
        return encode(encoder, *inputs)
    passing = SimpleNamespace(**{**vars(encoder), "layers": _FirstAlone(encoder.layers), "norm": None})
    with torch._C.DisableTorchFunction():
        if encode(passing, *inputs) is src:  # the fast path pads the results
            return encode(encoder, *inputs)
    output = encode(SimpleNamespace(layers=encoder.layers, norm=None), *inputs)
    output = output.masked_fill(src_key_padding_mask.bool()[..., None], 0.0)
    return output if encoder.norm is None else encoder.norm(output)

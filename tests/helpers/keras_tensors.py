"""Tensors of Keras's backend, and gradients by the backend's own differentiation."""

import keras
import numpy as np


def tensor(array, dtype="float32"):
    return keras.ops.convert_to_tensor(np.asarray(array), dtype)


def numbers(tensor):
    """The tensor as a NumPy array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def gradients(function, *arrays):
    """The gradients of a function of tensors with a scalar result at these NumPy arrays."""
    backend = keras.backend.backend()
    tensors = [tensor(x) for x in arrays]
    if backend == "torch":
        leaves = [x.requires_grad_() for x in tensors]
        function(*leaves).backward()
        return [numbers(x.grad) for x in leaves]
    if backend == "jax":
        import jax

        return [np.asarray(x) for x in jax.jit(jax.grad(function, tuple(range(len(tensors)))))(*tensors)]
    import tensorflow as tf

    @tf.function
    def differentiate(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = function(*tensors)
        return tape.gradient(result, tensors)

    return [x.numpy() for x in differentiate(*tensors)]

"""A task that one layer of attention learns in 200 steps: name the previous token of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

SEQUENCES, LENGTH, VOCABULARY, WIDTH, STEPS = 16, 10, 6, 16, 200


def make_task():
    """Return inputs (sequences, length, width), tokens and positions side by side, and the tokens to name."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SEQUENCES, LENGTH))
    angles = np.arange(LENGTH)[:, None] / 2.0 ** np.arange((WIDTH - VOCABULARY) // 2)
    positions = np.broadcast_to(np.concatenate([np.sin(angles), np.cos(angles)], -1), (SEQUENCES, LENGTH, 10))
    inputs = np.concatenate([np.eye(VOCABULARY)[tokens], positions], -1)
    return jnp.asarray(inputs, jnp.float32), jnp.asarray(np.roll(tokens, 1, axis=1))


def loss_of(logits, targets):
    """Return the mean cross-entropy; the first position has no previous token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)[:, 1:].mean()


def train(loss, parameters):
    """Return the loss of every step. `loss` takes the parameters, a tree of arrays, and the number of the step."""
    optimizer = optax.adam(3e-3)

    def step(state, number):
        parameters, memory = state
        value, gradient = jax.value_and_grad(loss)(parameters, number)
        with jax.numpy_dtype_promotion("standard"):  # as optax needs it
            change, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(parameters, change), memory), value

    start = parameters, optimizer.init(parameters)
    return jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(STEPS))[1])(start)


def assert_trains_alike(ours, theirs):
    """Both learn the task with the same loss in every step."""
    assert theirs[-1] < 0.01 < 1.5 < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)

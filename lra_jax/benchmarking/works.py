"""The functions of a case: an attention call, a decoding step, a model's step.

Each is a pure function ``arguments -> results``, together with functions that make its
arguments and feed its results into the next call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import gates, registry
from lra_jax.benchmarking.cases import FUSED, Case, split_subject
from lra_jax.configs import TrainConfig
from lra_jax.models import SequenceClassifier
from lra_jax.models.config import parse_options
from lra_jax.models.options import keyword_names, split_options
from lra_jax.tasks.base import classification_loss
from lra_jax.training.optimizer import make_optimizer
from lra_jax.training.step import compiled_step, init_state, step_function

Arguments = tuple[Any, ...]
Arrays = dict[str, jax.Array]


class Unsupported(Exception):
    """The mechanism has no such form; the message names it."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The program that is compiled for a case.

    Attributes:
      function: ``(*arguments) -> results``, jitted or not.
      make: ``() -> arguments``; traced, both to find their shapes and to make them.
      feed: ``(arguments, results) -> arguments`` of the next call.
      donated: the arguments that the call may overwrite.
      appends: whether it reads them completely and writes only one more position.
    """

    function: Callable[..., Any]
    make: Callable[[], Arguments]
    feed: Callable[[Arguments, Any], Arguments] = lambda arguments, _: arguments
    donated: tuple[int, ...] = ()
    appends: bool = False


def find(text: str) -> tuple[registry.Mechanism, dict[str, Any]]:
    """The mechanism and the options named by an ``--attention`` value."""
    name, options = split_subject(text)
    if name == FUSED:
        function = "lra_jax.benchmarking.fused:fused_softmax_attention"
        mechanism = registry.resolve(function)
        mechanism = dataclasses.replace(mechanism, name=FUSED, causal=True)
    else:
        mechanism = registry.resolve(name, "--attention")
    parsed = parse_options(options, "--attention")
    if name == "softmax":
        # The papers' baseline builds its matrix at every length.
        parsed = {"implementation": "dense"} | parsed
    split_options(mechanism, parsed)
    return mechanism, parsed


def make_work(case: Case) -> Work:
    """The work of a case; raises `Unsupported` if the mechanism has no such form."""
    mechanism, options = find(case.attention)
    if case.causal and mechanism.causal is False:
        raise Unsupported("no causal form")
    makers = {
        "forward": _attention,
        "forward+backward": _attention,
        "decode": _decoding,
        "inference": _inference,
        "train": _training,
    }
    return makers[case.work](case, mechanism, options)


def _attention(case: Case, mechanism: Any, options: dict[str, Any]) -> Work:
    sizes = {"is_causal": case.causal, "max_length": case.length}
    keywords = _keywords(mechanism, options) | sizes
    keywords = _keep_accepted(mechanism.attention, keywords)
    shape = (case.batch_size, case.length, case.heads, case.head_dim)

    def call(extra: Arrays, *arrays: jax.Array) -> jax.Array:
        return mechanism.attention(*arrays, **extra, **keywords)

    def both(extra: Arrays, *arrays: jax.Array) -> Any:
        """The output, and all gradients that training needs: those of gates and
        parameters too, but not those of buffers and integers."""
        *inputs, cotangent = arrays
        learned = {
            name: x
            for name, x in extra.items()
            if name not in mechanism.buffers and jnp.issubdtype(x.dtype, jnp.floating)
        }

        def run(learned: Arrays, *inputs: jax.Array) -> jax.Array:
            return call(extra | learned, *inputs)

        out, pullback = jax.vjp(run, learned, *inputs)
        return out, pullback(cotangent)

    backward = case.work == "forward+backward"

    def make() -> Arguments:
        extra = _parameters(case, mechanism, options) | _gates(case, mechanism, options)
        if case.rows == "padded":
            extra["mask"] = _mask(case)
        return extra, *_random(shape, case.dtype, 4 if backward else 3)

    return Work(both if backward else call, make)


def _keep_accepted(
    function: Callable[..., Any], keywords: dict[str, Any]
) -> dict[str, Any]:
    """The keywords that a function accepts."""
    names = registry.accepted_keywords(function)
    return {k: v for k, v in keywords.items() if names is None or k in names}


def _mask(case: Case) -> jax.Array:
    """`[B, T]`, False at both ends: the first queries of a causal form have no keys."""
    place, padding = jnp.arange(case.length), max(1, case.length // 8)
    visible = (place >= padding) & (place < case.length - padding)
    return jnp.broadcast_to(visible, (case.batch_size, case.length))


def _gates(case: Case, mechanism: Any, options: dict[str, Any]) -> Arrays:
    """The gates that a layer would pass to the mechanism, with random values."""
    shape = (case.batch_size, case.length, case.heads)
    arrays = {}
    for number, gate in enumerate(mechanism.gates_with(options)):
        width = () if gate.width == "one" else (case.head_dim,)
        key = jax.random.key(2 + number)
        drawn = jax.random.normal(key, (*shape, *width), jnp.dtype(case.dtype))
        arrays[gate.name] = gates.activate(gate.activation, drawn)
    return arrays


def _keywords(mechanism: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the function; an option that only sets the widths of a layer
    has none here."""
    of_parameters, keywords = split_options(mechanism, options)
    used = of_parameters.keys() | keywords.keys()
    for name in options.keys() - used - {gate.option for gate in mechanism.gates}:
        raise Unsupported(f"{name} sets the widths of a layer: measure --work=train")
    return keywords


def _parameters(case: Case, mechanism: Any, options: dict[str, Any]) -> Arrays:
    """The mechanism's own arrays, in the dtype of the case."""
    make = mechanism.make_parameters
    if make is None:
        return {}
    sizes = {
        "max_length": case.length,
        "num_heads": case.heads,
        "head_dim": case.head_dim,
        "dtype": jnp.dtype(case.dtype),
    }
    taken = keyword_names(make)
    sizes = {name: size for name, size in sizes.items() if name in taken}
    return make(jax.random.key(1), **sizes, **split_options(mechanism, options)[0])


def _random(shape: tuple[int, ...], dtype: str, count: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), count)
    return tuple(jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys)


def _decoding(case: Case, mechanism: Any, options: dict[str, Any]) -> Work:
    """The token after ``length`` others, from a state: softmax's holds all keys.

    The state is that of an empty stream, whose step costs the same.
    """
    if not mechanism.stream:
        raise Unsupported("no stream to decode with")
    keywords = _keywords(mechanism, options)
    start, step = mechanism.find("init"), mechanism.find("step")
    sizes = (case.batch_size, case.heads, case.head_dim)
    keeps_all = mechanism.name == "softmax"

    def make() -> Arguments:
        one = dataclasses.replace(case, length=1)
        gates = {name: x[:, 0] for name, x in _gates(one, mechanism, options).items()}
        parameters = _parameters(case, mechanism, options)
        settings = parameters | keywords | {"max_length": case.length + 1}
        if keeps_all:  # Its cache has the dtype of the keys; sums are float32.
            settings |= {"dtype": jnp.dtype(case.dtype)}
        state = start(*sizes, **_keep_accepted(start, settings))
        return state, parameters | gates, *_random(sizes, case.dtype, 3)

    def function(state: Any, extra: Arrays, *arrays: jax.Array) -> Any:
        return step(state, *arrays, **extra, **keywords)

    def feed(arguments: Arguments, results: Any) -> Arguments:
        return results[1], *arguments[1:]

    return Work(function, make, feed, donated=(0,), appends=keeps_all)


def _batch(case: Case) -> Arrays:
    """Sequences without padding, as in the papers' tables."""
    tokens, labels = jax.random.split(jax.random.key(0))
    rows = (case.batch_size,)
    shape, words = (*rows, case.length), case.model.vocab_size
    return {
        "tokens": jax.random.randint(tokens, shape, 1, words),
        "lengths": jnp.full(rows, case.length, jnp.int32),
        "labels": jax.random.randint(labels, rows, 0, case.model.num_classes),
    }


def _model(case: Case, mechanism: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The graph of a classifier, and a function that makes its parameters."""
    if case.causal:
        raise Unsupported("the classifier has no causal form")

    def make() -> SequenceClassifier:
        return SequenceClassifier(
            **dataclasses.asdict(case.model),
            max_length=case.length,
            # The fused baseline is not a registered mechanism; a function will do.
            mechanism=mechanism.function or mechanism.name,
            attention_options=options,
            dropout=0.1,
            dtype=jnp.dtype(case.dtype),
            rngs=nnx.Rngs(params=0),
        )

    return nnx.split(nnx.eval_shape(make))[0], lambda: nnx.state(make())


def _inference(case: Case, mechanism: Any, options: dict[str, Any]) -> Work:
    graphdef, params = _model(case, mechanism, options)

    def function(params: Any, batch: Arrays) -> jax.Array:
        return classification_loss(nnx.merge(graphdef, params), batch)["correct"]

    return Work(function, lambda: (params(), _batch(case)))


def _training(case: Case, mechanism: Any, options: dict[str, Any]) -> Work:
    graphdef, params = _model(case, mechanism, options)
    optimizer = make_optimizer(TrainConfig())
    function = step_function(classification_loss, graphdef, optimizer, seed=0)

    def make() -> Arguments:
        return init_state(params(), optimizer), _batch(case)

    def feed(arguments: Arguments, results: Any) -> Arguments:
        return results, arguments[1]

    return Work(compiled_step(function), make, feed)

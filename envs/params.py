"""Checks environment parameters that a user typed, by name, type and sign, with errors of one line."""

import difflib
import json

import numpy as np


def convert(env: str, given: dict, defaults: dict, positive: tuple[str, ...] = ()) -> dict:
    """The parameters in `given` as NumPy values of the types of their defaults; text is read as JSON.

    Args: env, the environment's id, for the messages; defaults, every parameter that it has;
        positive, those that count something and must be at least 1.
    Raises: ValueError naming a parameter that `env` does not have and the closest it has, or a
        value that is not of its parameter's type or shape.
    """
    known = sorted(defaults)
    for name in given:
        if name not in defaults:
            close = difflib.get_close_matches(name, known, 1, 0)
            raise ValueError(f"{env} has no parameter {name!r}; did you mean {close[0]!r}? It has: {', '.join(known)}")
    converted = {name: _convert(env, name, value, np.asarray(defaults[name])) for name, value in given.items()}
    for name in positive:
        if name in converted and converted[name] < 1:
            raise ValueError(f"{env}: {name} {converted[name]} must be at least 1")
    return converted


def _convert(env, name, value, default):
    is_bool = default.dtype == bool
    try:
        array = np.asarray(json.loads(value.lower()) if isinstance(value, str) else value)
        with np.errstate(invalid="ignore"):  # inf has no integer; the comparison below refuses it
            result = array.astype(default.dtype)
        # Equal unless the conversion lost something: a fraction, or NaN, which equals nothing.
        fits = array.shape == default.shape and (array.dtype == bool) == is_bool and (result == array).all()
    except (TypeError, ValueError, OverflowError):  # not JSON, not numbers, too large, or a ragged list
        fits = False
    if fits:
        return result
    kind = "true or false" if is_bool else "an integer" if default.dtype.kind == "i" else "a number"
    kind = f"{default.size} numbers" if default.ndim else kind
    raise ValueError(f"{env}: {name} must be {kind}, such as {default}; got {value!r}")

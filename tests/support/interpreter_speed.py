"""Triton's interpreter, without what it does again and again: a process of the interpreter calls `save_repetitions` once.

At each call of a function inside a kernel, the interpreter looks through all of Triton's language for operations to replace,
although they have been replaced since the launch began. And for each value it builds the table of dtypes again. Both together
are a third of its time.
"""

from __future__ import annotations

import functools


def save_repetitions() -> None:
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtype_of, dtypes = interpreter._get_np_dtype, {}
    replaced: set[int] = set()  # during one launch: the modules whose names for the language were looked through

    def patch_once(fn):
        if id(fn.__globals__) in replaced:
            return None  # nothing uses it: a launch restores what it replaced itself
        replaced.add(id(fn.__globals__))
        return patch(fn)

    @functools.wraps(launch)
    def launch_anew(self, *args, **kwargs):
        replaced.clear()
        return launch(self, *args, **kwargs)

    def by_name(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return dtype_of(dtype)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = dtype_of(dtype)
        return dtypes[scalar.name]

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = by_name

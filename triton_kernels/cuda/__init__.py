"""CUDA C++ kernels, compiled at run time: the backend `cuda`.

`launch` holds the entry points, with the signatures of `hf_lowbit_kv.storage.reference`; `compile` turns the sources beside it into
kernels; `geometry` says how a layer's formats and sizes become the constants of a compilation.
"""

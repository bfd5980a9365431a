"""CUDA C++ kernels, compiled at run time: the backend `cuda`.

`cuda_entry_points` has the functions that a backend calls, with the signatures of `hf_lowbit_kv.storage.reference`; `nvrtc`
turns the sources beside it into kernels; `geometry` says how a layer's formats and sizes become the constants of a compilation.
"""

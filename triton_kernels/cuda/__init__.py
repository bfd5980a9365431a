"""CUDA C++ kernels, compiled at run time: the backend `cuda`.

`cuda_entry_points` has the functions that a backend calls, with the signatures of `hf_lowbit_kv.storage.reference`.
`nvrtc` compiles the sources beside it. `geometry` turns a layer's formats and sizes into the constants of a
compilation.
"""

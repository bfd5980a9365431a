"""Triton kernels, same stems as the page formats; imported as `hf_lowbit_kv.triton_kernels`.

`entry_points` has the functions that a backend calls, with the signatures of `hf_lowbit_kv.storage.reference`. A format's
device functions stand in the module that `registry` names for it.
"""

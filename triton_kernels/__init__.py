"""Triton kernels, imported as `hf_lowbit_kv.triton_kernels`. A format's kernels have the file name of the format.

`entry_points` has the functions that a backend calls, with the signatures of `hf_lowbit_kv.storage.reference`.
`registry` names the module that holds a format's device functions.
"""

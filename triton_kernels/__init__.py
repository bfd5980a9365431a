"""Triton kernels, same stems as the page formats; imported as `hf_lowbit_kv.triton_kernels`.

`launch` holds the entry points, with the signatures of `hf_lowbit_kv.storage.reference`. A format's device functions stand in the
module that `registry` names for it.
"""

"""`python -m hf_lowbit_kv.cli` is the command `hf-lowbit-kv`."""

from . import main

main()

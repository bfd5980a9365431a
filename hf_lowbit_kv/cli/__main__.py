"""`python -m hf_lowbit_kv.cli` is the command `hf-lowbit-kv`."""

from . import main

if __name__ == "__main__":
    main()

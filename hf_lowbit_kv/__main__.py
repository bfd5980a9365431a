"""`python -m hf_lowbit_kv`: the command `hf-lowbit-kv`."""

from .cli import main

if __name__ == "__main__":
    main()

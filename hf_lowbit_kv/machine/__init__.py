"""Facts about this machine: compilers and drivers, folders of kept files, changed files and tensors."""

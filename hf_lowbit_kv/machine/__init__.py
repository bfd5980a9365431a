"""What this machine has, and the files that are kept on it."""

"""`hf-lowbit-kv serve`: transformers' OpenAI-compatible server on a pool of rows with packed pages."""

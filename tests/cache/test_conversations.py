"""Random conversations: a `dense` cache gives the logits of a fresh reading of the whole text, or refuses as documented.

`CONVERSATIONS=n` runs n of them.
"""

from __future__ import annotations

import os

import pytest
from conversations import FAMILIES, Conversation
from marked import newest_case

#: of all families together; they take some 20 seconds of a CPU
COUNT = int(os.environ.get("CONVERSATIONS") or 36)


# PEFT asks for an attribute that the newest transformers deprecates
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.host
@pytest.mark.timeout(0 if "CONVERSATIONS" in os.environ else 600)
@pytest.mark.parametrize(
    "family", [family if family in ("llama", "gemma2", "qwen3_next") else newest_case(family) for family in FAMILIES]
)
def test_any_conversation(family, tmp_path, one_thread):
    tokens = ties = refusals = 0
    for number in range(FAMILIES.index(family), COUNT, len(FAMILIES)):
        conversation = Conversation(family, f"{os.environ['TEST_SEED']} {number}", tmp_path)
        try:
            conversation.run()
        except Exception as error:
            error.add_note(f"conversation {number}")
            raise
        tokens, ties = tokens + conversation.tokens, ties + conversation.ties
        refusals += conversation.refusals
    print(f"{family}: {tokens} tokens, {ties} near-ties, {refusals} refusals")
    assert tokens > 0
    assert ties <= tokens / 200

"""What layers that cannot tell how many tokens they have read are known to have read."""

from __future__ import annotations


class Ledger:
    """Tokens read by each recurrent layer, kept against the tokens that the cache's first packed layer has taken.

    A forward pass that is interrupted leaves some layers with its tokens and others without. Recurrent layers hold a state, not
    tokens, so nothing in them shows it. This keeps the count for them: of passes that run eagerly; after compiled ones it
    begins anew. An interruption inside the last layer of a model that ends in a recurrent one is not seen.
    """

    def __init__(self, empty: bool = True):
        """empty: nothing has been read yet; else it is not known what has been."""
        self.empty = empty
        self.read: dict[int, int] = {}
        # layers in front of the first packed one that have begun to read a pass's tokens
        self.waiting: set[int] = set()
        self.chunk = 0  # tokens of the pass

    def begins(self, layer: int, in_front: bool, taken: int) -> bool:
        """A layer begins to read. Whether it has read all that came before.

        Args:
            in_front: of the first packed layer. taken: tokens that this one has taken until now.
        """
        before = taken if in_front else taken - self.chunk
        if layer in self.waiting or self.read.get(layer, 0 if self.empty else before) != before:
            return False
        if in_front:
            self.waiting.add(layer)  # how many tokens the pass has is known when it comes to the packed layer
        else:
            self.read[layer] = taken
        return True

    def takes_back(self, layer: int) -> None:
        """The layer has not read the pass's tokens after all."""
        self.waiting.discard(layer)

    def packed(self, taken: int, tokens: int) -> None:
        """The pass has come to the first packed layer, which has taken so many tokens before and is given so many."""
        self.chunk = tokens
        self.read |= dict.fromkeys(self.waiting, taken + tokens)
        self.waiting.clear()

    def crop(self, tokens: int) -> None:
        self.read = {layer: count - tokens for layer, count in self.read.items()}

"""Registers the attention implementation `lowbit_kv` with transformers. This file imports neither torch nor transformers.

transformers keeps attention functions in `transformers.modeling_utils`, whose import takes as long as that of torch. Every
model needs that module, and the package itself does not. So `import hf_lowbit_kv` only arranges for the registration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: the name under which the attention function and the mask function are registered
ATTENTION_NAME = "lowbit_kv"
#: the module of transformers that defines `AttentionInterface`
MODULE = "transformers.modeling_utils"


def register() -> None:
    """Make `attn_implementation="lowbit_kv"` known to transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from .attention_function import lowbit_attention, lowbit_mask

    AttentionInterface.register(ATTENTION_NAME, lowbit_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lowbit_mask)


def register_with_transformers() -> None:
    """Call `register` now if transformers' models can be imported already, or else as soon as `MODULE` is imported."""
    if MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds `MODULE` as the other finders do, and calls `register` after its first import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._register_after(spec.loader)
        return spec

    def _register_after(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was
            execute(module)
            register()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module  # type: ignore[method-assign]

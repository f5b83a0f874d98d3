"""Takes out of Triton's interpreter what costs tests of kernels more than half of their time and changes nothing."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def hasten() -> None:
    """Before it has run a kernel, and after all that imports Triton where anything does."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    builder, language = interpreter.interpreter_builder, interpreter.tl
    # Each sum of integers is computed in 64 bits too, for an assertion that is left out: it needs `debug`.
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    patch_language, patched = interpreter._patch_lang, set[Any]()

    def patch_once(function: Callable[..., Any]) -> Any:
        """Once a launch, not at each call of a function of the kernel."""
        asked = {value for value in function.__globals__.values() if value is language or value is language.core}
        if asked and asked <= patched:
            return interpreter._LangPatchScope()
        scope = patch_language(function)
        patched.update(asked)
        restore = scope.restore

        def forget() -> None:
            restore()
            patched.clear()

        scope.restore = forget
        return scope

    @functools.cache
    def builtins(where: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(where) if language.core.is_builtin(member)]

    def patch(where: Any, builder: object, scope: object) -> None:
        """Looks through the language once."""
        for name in builtins(where):
            if language.core.is_builtin(member := getattr(where, name)):  # otherwise it is patched
                interpreter._patch_attr(where, name, member, builder, scope)

    def patch_attribute(where: Any, name: str, member: Callable[..., Any], builder: object, scope: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*given, **named)

        scope.set_attr(where, name, call)

    interpreter._patch_lang, interpreter._patch_builtin, interpreter._patch_attr = patch_once, patch, patch_attribute
    keep_types(interpreter, language.core)


def keep_types(interpreter: Any, core: Any) -> None:
    """Each operation makes types of blocks, and constants for a tensor's shape: those of one shape are made once."""
    make_block_type, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    # The attributes of a type of blocks, by the identity of its elements' type and its shape.
    kept: dict[tuple[int, ...], dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def sizes_of(kind: Any) -> tuple[Any, Any]:
        tensor = object.__new__(core.tensor)
        make_tensor(tensor, None, kind)
        return tensor.numel, tensor.shape

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        attributes = kept.get(key := (id(element_ty), *sizes))
        if attributes is None:
            make_block_type(self, element_ty, shape)
            self.sizes = sizes_of(self)
            kept[key] = dict(vars(self))  # with element_ty, so that no other object has its identity
        else:
            vars(self).update(attributes)

    scalar_sizes = sizes_of(core.int32)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else scalar_sizes

    def numpy_type_once(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        if isinstance(element, core.pointer_type):
            return numpy_type(kind)
        if element.name not in numpy_types:
            numpy_types[element.name] = numpy_type(element)
        return numpy_types[element.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, numpy_type_once

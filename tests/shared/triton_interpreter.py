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

    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch

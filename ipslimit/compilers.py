"""numba's compiler for loops that call each other and are run through a few entries alone.

numba makes each function it compiles ready to be run by itself: optimised, made machine code, with
wrappers for calls from Python and from C. And then it optimises it again in all that calls it. Here
a function that compiled code alone calls stays as it is, and an entry is optimised once, with all
that it calls.
"""

from __future__ import annotations

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import InlineOverloads, NopythonRewrites
from numba.core.untyped_passes import DeadBranchPrune, InlineClosureLikes, WithLifting

# Passes that find nothing to do in loops over numbers: no closures, no products of whole arrays.
UNUSED = (WithLifting, InlineClosureLikes, DeadBranchPrune, NopythonRewrites, InlineOverloads)


class InnerLoop(CPUDispatcher):
    """What compiled code calls and Python cannot, for want of machine code of its own."""

    def __call__(self, *args, **kwargs):
        raise TypeError(
            f"{self.py_func.__qualname__} is called from compiled code alone; make it a "
            "compiled_entry, or take its py_func"
        )

    def get_call_template(self, args, kws):
        loose = [types.unliteral(kind) for kind in args]
        return super().get_call_template(loose, {k: types.unliteral(v) for k, v in kws.items()})

    def add_overload(self, cres):
        self.overloads[tuple(cres.signature.args)] = cres  # and not to what Python calls


class EntryCompiler(Compiler):
    """numba's compiler, for entries and callbacks: without what their code makes no use of."""

    unused = UNUSED

    def define_pipelines(self):
        (pipeline,) = super().define_pipelines()
        pipeline.passes = [step for step in pipeline.passes if step[0] not in self.unused]
        return [pipeline]

    def _compile_core(self):
        self.state.library = self._library(EntryLibrary)
        return super()._compile_core()

    def _library(self, kind: type) -> JITCodeLibrary:
        library = kind(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        library.enable_object_caching()
        return library


class InnerCompiler(EntryCompiler):
    """The same for inner loops: the result stays as it is until it is linked into an entry."""

    def _compile_core(self):
        state = self.state
        state.flags.no_compile = True
        state.library = self._library(InnerLibrary)
        result = Compiler._compile_core(self)
        called = object()  # callers know it by this, where others have a function of Python's
        state.targetctx.insert_user_function(called, result.fndesc, [result.library])
        return result._replace(entry_point=called)


class InnerCompilerOfAnything(InnerCompiler):
    """The same, for code that may hold whatever numba knows."""

    unused = ()


class EntryLibrary(JITCodeLibrary):
    """Code that is optimised once.

    numba does it twice, since the first time lets more counts of references cancel; here few count.
    """

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        found = self._codegen._module_pass_manager()  # before numba 0.62, without a builder
        passes, *builder = found if isinstance(found, tuple) else (found,)
        passes.run(self._final_module, *builder)


class InnerLibrary(EntryLibrary):
    """Code that is optimised, and made machine code, only with what it has been linked into."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True
